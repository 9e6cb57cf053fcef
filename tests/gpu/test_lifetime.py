"""The table of programs on real CUDA graphs: what the emulation flags goes wrong there, and what it passes is right.

Set HOTLOOP_LIFETIME_TABLE to a folder, and the outcomes are written there as JSON and as a table for the docs.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.errors import StaleOutputError

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
from lifetime_cases import CASES
from lifetime_programs import World, Writes
from two_networks import Ranker, batches, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
PRESET = "reduce-overhead"
WARM = (0, 4)
"""Clean steps before a program: none, so that it is warm-up and recording; and enough for replays."""
ROWS = {}


@pytest.fixture(autouse=True)
def _fresh_graphs():
    yield
    torch._inductor.cudagraph_trees.reset_cudagraph_trees()


@pytest.fixture(scope="module", autouse=True)
def _table():
    yield
    if not (folder := os.environ.get("HOTLOOP_LIFETIME_TABLE")) or not ROWS:
        return
    rows = [
        {"case": case.name, "emulation": "flagged" if case.flagged else "passed", "why": case.why, **ROWS[case.name]}
        for case in CASES
        if case.name in ROWS
    ]
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    Path(folder, "lifetime.json").write_text(json.dumps({**device, "cases": rows}, indent=1) + "\n")
    heads = ("case", "emulation", "recording", "replay", "hotloop", "why")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row.get(head, "") for head in heads) + " |" for row in rows]
    Path(folder, "lifetime.md").write_text("\n".join(lines) + "\n")


def outcome(case, compiler, warm, expected):
    """Run a program and say what became of it: ``right``, ``wrong values``, or ``raises``."""
    try:
        found = case.program(World(compiler, "cuda", warm))
    except StaleOutputError:
        return "raises"
    except RuntimeError as error:
        if "overwritten by a subsequent run" not in str(error):  # torch's own words, while it records
            raise
        return "raises"
    close = all(abs(one - other) <= 1e-3 * max(1.0, abs(other)) for one, other in zip(found, expected, strict=True))
    return "right" if close else "wrong values"


def note(case, what, found):
    ROWS.setdefault(case.name, {})[what] = found


@EVERY
def test_what_the_emulation_flags_goes_wrong_on_the_gpu_and_what_it_passes_is_right(case):
    found = {}
    for warm in WARM:
        expected = case.program(World(lambda module: module, "cuda", warm))
        torch.compiler.reset()
        with torch._functorch.config.patch(donated_buffer=False):  # else torch refuses to keep a graph
            found[warm] = outcome(case, lambda module: torch.compile(module, mode=PRESET), warm, expected)
    note(case, "recording", found[WARM[0]])
    note(case, "replay", found[WARM[1]])
    if case.flagged:
        assert set(found.values()) != {"right"}
    else:
        assert set(found.values()) == {"right"}


@EVERY
@pytest.mark.parametrize("warm", WARM)
def test_hotloops_compile_is_right_by_default(case, warm):
    expected = case.program(World(lambda module: module, "cuda", warm))
    found = outcome(case, lambda module: hotloop.compile(module, PRESET), warm, expected)
    note(case, "hotloop", found)
    assert found == case.hotloop


@EVERY
@pytest.mark.parametrize("warm", WARM)
def test_strict_lifetime_is_never_silently_wrong(case, warm):
    expected = case.program(World(lambda module: module, "cuda", warm))
    compiler = lambda module: hotloop.compile(module, PRESET, strict_lifetime=True)  # noqa: E731
    assert outcome(case, compiler, warm, expected) in ("right", "raises")


def test_a_graph_that_writes_into_its_input_is_skipped_with_a_reason():
    model = hotloop.compile(Writes().cuda(), PRESET)
    with torch.no_grad():
        for _ in range(3):
            model(torch.zeros(4, 8, device="cuda"))
    assert hotloop.status(model).components["model"].cudagraphs_skipped


def test_two_networks_train_a_thousand_steps_and_are_asked_in_between():
    """1,000 steps, four calls of each network between any two: captured, nothing compiled again, numbers as eager's."""
    steps = 1000
    before = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    losses, orders, gists = run(Ranker("cuda"), batches(steps, "cuda"))
    ranker = Ranker("cuda").compile()
    with hotloop.watch() as events:
        found = run(ranker, batches(steps, "cuda"))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == before
    status = hotloop.status({"gist": ranker.gist, "lens": ranker.lens}).components
    for one in status.values():
        assert (one.state, one.running, one.causes, one.cudagraphs_skipped) == ("compiled", PRESET, (), ())
        assert one.modes["training"]["calls"] == steps
        assert one.modes["inference"]["calls_per_step"] == {"4": steps - 1}
    assert not [event for event in events if event.kind == "recompiled"]
    early = 20  # rounding grows over steps: the first are held to eager's numbers, the rest to eager's course
    assert found[0][:early] == pytest.approx(losses[:early], rel=1e-3)
    assert found[1][:early] == orders[:early]
    for one, other in zip(found[2][: 2 * early], gists[: 2 * early], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert sum(found[0][-100:]) == pytest.approx(sum(losses[-100:]), rel=0.1)


def test_memory_of_graphs_does_not_grow_with_the_steps():
    ranker = Ranker("cuda").compile()
    given = batches(4, "cuda")
    for _ in range(5):
        run(ranker, given)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(50):
        run(ranker, given)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + 2**21
