"""The emulation of CUDA graphs: what it flags, what it passes, and what its messages say."""

import threading
from pathlib import Path

import pytest
import torch
from lifetime_cases import CASES
from lifetime_programs import HandsOn, World, Writes
from torch import nn

import hotloop
from hotloop._torch import cudagraphs
from hotloop.errors import ConfigError, StaleOutputError
from hotloop.testing import cudagraph_emulation

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def eager(case):
    return case.program(World(lambda module: module))


@EVERY
@pytest.mark.some_of(3)
def test_plain_compile_is_flagged_or_right(case):
    expected = eager(case)
    with cudagraph_emulation() as emulation:
        world = World(lambda module: torch.compile(module, backend=emulation.backend))
        if case.flagged:
            with pytest.raises(StaleOutputError):
                case.program(world)
        else:
            assert case.program(world) == expected


@EVERY
@pytest.mark.some_of(3)
def test_hotloops_compile_is_right_by_default(case):
    expected = eager(case)
    with cudagraph_emulation():
        world = World(lambda module: hotloop.compile(module, "reduce-overhead"))
        if case.hotloop == "raises":
            with pytest.raises(StaleOutputError, match="marked between a forward and its backward"):
                case.program(world)
        else:
            assert case.program(world) == expected


def line_of(text):
    """Return file and number of the line in this file that holds ``text`` and the mark ``# <-``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if text in line and line.endswith("# <-")]
    return f"{__file__}:{found[0]}"


class Scorer(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(width, 2)

    def forward(self, x):
        hidden = torch.relu(x)
        return self.layer(hidden)  # <-


def test_the_error_names_the_output_where_it_was_made_and_where_it_is_read():
    with cudagraph_emulation() as emulation, torch.no_grad():
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        first = scorer(torch.ones(3, 8))
        scorer(torch.ones(3, 8))
        with pytest.raises(StaleOutputError) as stale:
            print(first * 2)  # <-
    read, made = line_of("print(first * 2)"), line_of("return self.layer(hidden)")
    assert str(stale.value).startswith(f"aten.mul reads at {read}")
    assert f"[3, 2], float32) of the inference, made at {made}" in str(stale.value)


def test_a_gradient_is_named_by_its_parameter():
    with cudagraph_emulation() as emulation:
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        scorer(torch.ones(3, 8)).sum().backward()
        with pytest.raises(
            StaleOutputError, match=r"gradient \d \(of layer\.weight, \[2, 8\], float32\) of the backward"
        ):
            scorer(torch.zeros(3, 8)).sum().backward()


def test_what_reads_past_the_dispatcher_finds_nan_and_largest_integers():
    def both(x):
        return torch.tanh(x), (x > 0).long() + 1

    with cudagraph_emulation() as emulation, torch.no_grad():
        compiled = torch.compile(both, backend=emulation.backend)
        one, two = compiled(torch.ones(4))
        compiled(torch.zeros(4))
        assert one.numpy().tolist() == pytest.approx([float("nan")] * 4, nan_ok=True)
        assert two.numpy().tolist() == [2**63 - 1] * 4


def test_what_is_still_held_is_listed_whether_or_not_it_is_read():
    with cudagraph_emulation() as emulation, torch.no_grad():
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        held = scorer(torch.ones(3, 8))
        scorer(torch.ones(3, 8))
        (found,) = emulation.overwritten
        assert found.output.shape == held.shape == (3, 2)
        assert "overwritten by the call at" in str(found)


def test_a_graph_that_writes_into_an_input_is_skipped_with_its_line_and_one_that_updates_buffers_is_not():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(x)

    with cudagraph_emulation() as emulation, torch.no_grad():
        normed = hotloop.compile(Normed(), "reduce-overhead")
        normed(torch.randn(3, 8))
        assert emulation.skipped == []
        writes = hotloop.compile(Writes(), "reduce-overhead")
        writes(torch.randn(3, 8))
        (skipped,) = emulation.skipped
        assert skipped.reason == "it writes into an input (args[0])"
        assert skipped.file.endswith("lifetime_programs.py")
        status = hotloop.status(writes)
        assert status.components["model"].cudagraphs_skipped == ("it writes into an input (args[0])",)
        assert "no CUDA graph was captured: it writes into an input" in str(status)


def test_one_thread_does_not_overwrite_what_another_ones_graphs_left():
    with cudagraph_emulation() as emulation, torch.no_grad():
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        mine = scorer(torch.ones(3, 8))
        other = threading.Thread(target=scorer, args=(torch.zeros(3, 8),))
        other.start()
        other.join()
        assert emulation.overwritten == []
        mine.sum()


def test_a_second_thread_sees_its_stale_reads_when_it_watches():
    raised = []

    def work(emulation, scorer):
        with emulation.watching(), torch.no_grad():
            first = scorer(torch.ones(3, 8))
            scorer(torch.zeros(3, 8))
            try:
                first.sum()
            except StaleOutputError as error:
                raised.append(error)

    with cudagraph_emulation() as emulation:
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        other = threading.Thread(target=work, args=(emulation, scorer))
        other.start()
        other.join()
    assert len(raised) == 1


def test_after_the_block_everything_is_as_before():
    torch.compiler.cudagraph_mark_step_begin()
    before = cudagraphs.marked()
    with cudagraph_emulation() as emulation:
        assert cudagraphs.marked() == 0
        with pytest.raises(ConfigError, match="in force already"), cudagraph_emulation():
            pass
        scorer = torch.compile(Scorer(), backend=emulation.backend)
        scorer(torch.ones(3, 8))
        torch.compiler.cudagraph_mark_step_begin()
    assert cudagraphs.marked() == before
    with torch.no_grad():  # the code runs on, unwatched
        first = scorer(torch.ones(3, 8))
        copy = first.clone()
        scorer(torch.zeros(3, 8))
    assert torch.equal(first, copy)
    later = hotloop.compile(Scorer(), "reduce-overhead", ladder=())  # without a GPU it steps down again
    later(torch.ones(3, 8))
    assert hotloop.status(later).components["model"].running != "reduce-overhead" or torch.cuda.is_available()


@pytest.mark.parametrize("preset", ["reduce-overhead", "triton", "max-autotune"])
def test_every_preset_with_cuda_graphs_runs_in_the_emulation(preset):
    with cudagraph_emulation() as emulation:
        model = hotloop.compile(HandsOn(), preset)
        model(torch.ones(2, 8))[0].sum().backward()
        assert hotloop.status(model).components["model"].running == preset
        assert emulation.runs == 2
