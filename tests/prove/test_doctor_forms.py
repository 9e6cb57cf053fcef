"""What a step could have in another form: padded sizes, another attention or precision, no checks, fewer shapes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop import diagnose
from hotloop._torch.dispatch import observing
from hotloop.events import HostSync
from hotloop.prove.doctor import examining, host_waits, outside, variants
from hotloop.prove.doctor.examining import examine
from hotloop.prove.doctor.host_waits import with_waits
from hotloop.prove.doctor.layers import fused_attention, padded_linears
from hotloop.prove.doctor.outside import new_shapes
from hotloop.prove.doctor.step_calls import StepCalls
from hotloop.step import Workload

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def calls_of(step):
    calls = StepCalls(CPU)
    with calls.observe():
        step()
    return calls


def manual(q, k, v):
    weights = (q @ k.transpose(-1, -2) / 3).masked_fill(torch.zeros(k.shape[-2], dtype=torch.bool), -9).softmax(-1)
    return F.dropout(weights, 0.1) @ v


def rules(measurements, rule):
    return [one for one in diagnose.diagnose({"measurements": measurements}) if one.rule == rule]


def linears_of(model, *inputs):
    calls = calls_of(lambda: model(*inputs).sum().backward())
    return padded_linears(calls, {"model": model}, CPU, lambda: None)


class Words(nn.Module):
    """A small language model."""

    def __init__(self, words, *, tied):
        super().__init__()
        self.tokens = nn.Embedding(words, 16)
        self.head = nn.Linear(16, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        return self.head(self.tokens(x))


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_is_timed_padded_at_the_shape_of_the_step(tied):
    (found,) = linears_of(Words(1003, tied=tied), torch.zeros(2, 8, dtype=torch.int64))
    assert {"name": "model.head", "rows": 16, "inner": 16, "outer": 1003}.items() <= found.items()
    assert {"padded_inner": 16, "padded_outer": 1024, "calls": 1, "vocabulary": True}.items() <= found.items()
    for name in ("step_ms", "padded_step_ms"):
        assert 0 < found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    slow = found | {"step_ms": 3.0, "step_ms_low": 2.9, "padded_step_ms": 2.0, "padded_step_ms_high": 2.1}
    (advice,) = rules({"linears": [slow]}, "odd_size")
    assert (advice.kind, advice.milliseconds) == ("vocabulary", pytest.approx(1.0))
    assert "nn.Linear(16, 1024, ...) and nn.Embedding(1024, ...)" in advice.change
    assert "numerics" in advice.change
    (advice,) = rules({"linears": [slow | {"resizes": True}]}, "odd_size")
    assert "model.resize_token_embeddings(1003, pad_to_multiple_of=64)" in advice.change


@pytest.mark.parametrize(
    "score",
    [
        F.linear,
        lambda x, weight: x @ weight.T,
        lambda x, weight: torch.matmul(x, weight.t()),
        lambda x, weight: torch.mm(x[0], weight.transpose(0, 1)),
    ],
)
def test_a_head_that_calls_with_an_embeddings_own_weight_is_found(score):
    class Tied(Words):
        def forward(self, x):
            return score(self.tokens(x), self.tokens.weight)

    (found,) = linears_of(Tied(1003, tied=False), torch.zeros(2, 8, dtype=torch.int64))
    assert (found["name"], found["vocabulary"], found["outer"]) == ("model.tokens", True, 1003)


def test_a_product_with_another_transpose_is_no_layer():
    weight = nn.Parameter(torch.ones(1003, 1003))
    calls = calls_of(lambda: (torch.ones(2, 1003) @ (weight * 2).T + torch.ones(2, 1003) @ weight).sum().backward())
    assert not calls.linears


def test_any_large_layer_is_timed_once_for_all_its_calls():
    body = nn.Linear(600, 600)
    calls = calls_of(lambda: body(body(torch.zeros(4, 600))).sum().backward())
    found = padded_linears(calls, {"body": body}, CPU, lambda: None)
    assert [(one["name"], one["padded_outer"], one["vocabulary"]) for one in found] == [("body", 640, False)]
    assert found[0]["calls"] == 2


def test_sizes_that_are_right_or_small_are_not_timed():
    assert linears_of(Words(1024, tied=True), torch.zeros(2, 8, dtype=torch.int64)) == []
    assert linears_of(nn.Linear(100, 10), torch.zeros(4, 100)) == []


def test_layers_run_under_the_autocast_of_the_step():
    model = nn.Linear(16, 1003)
    with torch.autocast("cpu", torch.bfloat16):
        (layer,) = calls_of(lambda: model(torch.zeros(4, 16))).linears
    assert (layer.autocast, layer.dtype, layer.weight_dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("figures", [{"padded_step_ms_high": 2.95}, {"step_ms": 2.001, "padded_step_ms": 2.0}])
def test_a_padded_layer_that_is_no_faster_or_saves_next_to_nothing_is_no_advice(figures):
    whole = {"name": "head", "rows": 1, "inner": 16, "outer": 1003, "padded_inner": 16, "padded_outer": 1024}
    whole |= {"step_ms": 3.0, "step_ms_low": 2.9, "padded_step_ms": 2.0, "padded_step_ms_high": 2.1, "calls": 1}
    ways = {"eager": {"step_ms": 10.0}}
    assert rules({"linears": [whole], "ways": ways}, "odd_size")
    assert not rules({"linears": [whole | figures], "ways": ways}, "odd_size")


# -- attention ---------------------------------------------------------------------------------------------------------


def test_attention_by_a_softmax_of_its_own_is_timed_beside_the_fused_one():
    q, k, v = (torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7))
    calls = calls_of(lambda: (manual(q, k, v) + manual(q, k, v)).sum().backward())
    (found,) = fused_attention(calls, CPU, lambda: None)
    assert {"heads": 6, "queries": 5, "keys": 7, "width": 8, "calls": 2}.items() <= found.items()
    assert found["file"] == __file__
    assert "weights" not in calls.places
    assert 0 < found["fused_step_ms_low"] <= found["fused_step_ms"]
    slow = found | {"step_ms": 3.0, "step_ms_low": 2.9, "fused_step_ms": 2.0, "fused_step_ms_high": 2.1}
    (advice,) = rules({"attention": [slow]}, "slower_attention")
    assert (advice.kind, advice.milliseconds, advice.line) == ("manual", pytest.approx(2.0), found["line"])


def test_torchs_attention_and_other_softmaxes_are_no_attention_by_hand():
    q = torch.randn(2, 3, 5, 8, requires_grad=True)

    def step():
        with sdpa_kernel(SDPBackend.MATH):  # it is products and a softmax as well, but not the program's
            F.scaled_dot_product_attention(q, q, q).sum().backward()
        gates = torch.randn(2, 4, 5).softmax(-1)
        (gates @ torch.randn(2, 5, 3)).sum()
        (q @ q.transpose(-1, -2)).softmax(-2).sum()

    calls = calls_of(step)
    assert not calls.manual
    assert "manual" not in calls.places


def test_a_kernel_that_is_switched_off_is_seen_and_run_after_all():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    q = torch.randn(1, 2, 4, 8)

    assert calls_of(lambda: layer(torch.randn(2, 4, 16))).places == {}
    with sdpa_kernel(SDPBackend.MATH):
        assert set(calls_of(lambda: layer(torch.randn(2, 4, 16))).places) == {"backends"}
        calls = calls_of(lambda: F.scaled_dot_product_attention(q, q, q))
    assert calls.places["backends"][0] == __file__
    (way,) = variants.variants(calls, [], [layer], CPU, contextlib.nullcontext)
    assert (way.name, way.place) == ("all attention kernels", calls.places["backends"])
    with way.running(), sdpa_kernel(SDPBackend.MATH):
        assert kernels_during(q) == [True]


def kernels_during(q):
    """Return whether fused attention is allowed while torch's attention runs."""
    found = []

    def seen(operation, args, kwargs):
        found.append(torch.backends.cuda.flash_sdp_enabled())
        return operation(*args, **kwargs)

    with observing(seen):
        F.scaled_dot_product_attention(q, q, q)
    return sorted(set(found))


def test_attention_that_returns_weights_can_be_run_without():
    layer = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 4, 16)
    calls = calls_of(lambda: layer(x, x, x)[0].sum().backward())
    assert set(calls.places) == {"weights"}
    assert not calls.manual
    (way,) = variants.variants(calls, [], [layer], CPU, contextlib.nullcontext)
    with way.running():
        out, weights = layer(x, x, x)
    assert weights is None
    torch.testing.assert_close(out, layer(x, x, x)[0])
    assert calls_of(lambda: layer(x, x, x, need_weights=False)).places == {}


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def checking(monkeypatch):
    """The checks of distributions are made, as in a new process: the first torch.compile of a process turns them off."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)


@pytest.fixture
def on_a_card(monkeypatch):
    """Take a step that was seen on the CPU for one on a card with tensor cores."""
    monkeypatch.setattr(variants, "has_tensor_cores", lambda _: True)
    return lambda step, *modules: [
        way.name for way in variants.variants(calls_of(step), [], modules, CUDA, contextlib.nullcontext)
    ]


def test_precision_is_offered_where_products_are_in_float32(on_a_card):
    model = nn.Linear(8, 8)

    def step():
        model(torch.zeros(2, 8)).sum().backward()

    assert on_a_card(step) == ["with TF32", "with autocast"]
    torch.set_float32_matmul_precision("high")
    assert on_a_card(step) == ["with autocast"]
    with torch.autocast("cpu", torch.bfloat16):
        assert on_a_card(step) == []
    assert on_a_card(lambda: model.to(torch.bfloat16)(torch.zeros(2, 8, dtype=torch.bfloat16))) == []
    assert on_a_card(lambda: torch.zeros(3).add_(1)) == []


def test_a_part_in_half_precision_is_no_reason_for_autocast_but_one_in_float32_for_tf32(on_a_card):
    def step():
        with torch.autocast("cpu", torch.bfloat16):
            torch.zeros(2, 2) @ torch.zeros(2, 2)
        torch.zeros(2, 2) @ torch.zeros(2, 2)

    assert on_a_card(step) == ["with TF32"]


def test_a_cpu_is_offered_no_precision():
    assert variants.variants(calls_of(lambda: nn.Linear(8, 8)(torch.zeros(2, 8))), [], [], CPU, None) == []


def test_tf32_is_put_back():
    with variants.tf32():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_layout_of_convolutions_is_a_way_where_it_changes_anything(on_a_card):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    pictures = torch.randn(1, 3, 8, 8)

    def step():
        model(pictures)

    assert on_a_card(step, *model) == ["channels_last"]
    (way,) = variants.variants(calls_of(step), [], list(model), CUDA, contextlib.nullcontext)
    with way.running():
        assert model(pictures).is_contiguous(memory_format=torch.channels_last)
    assert model(pictures).is_contiguous()
    model.to(memory_format=torch.channels_last)
    assert on_a_card(step, *model) == []


# -- checks, and the whole examination ---------------------------------------------------------------------------------


def timed_as(monkeypatch, milliseconds):
    """Replace measuring: the ways of an examination get the times of a table, and nothing else is timed."""

    def set_times(examination, ways):
        for way in ways:
            way.samples = [size * milliseconds.get(way.name, 1.0) / 1e3 for size in (1, 1, 1, 1, 1, 3, 0.1)]

    monkeypatch.setattr(examining, "fused_optimizers", lambda *_: [])
    monkeypatch.setattr(examining._Examination, "_time", set_times)


def test_layers_that_are_timed_apart_are_no_part_of_a_steps_peak(program, monkeypatch):
    within, seen = [], []

    @contextlib.contextmanager
    def peak(_examination, way):
        within.append(way)
        yield
        within.pop()

    monkeypatch.setattr(examining._Examination, "_peak", peak)
    monkeypatch.setattr(examining, "padded_linears", lambda *_: seen.append(list(within)) or [])
    monkeypatch.setattr(examining, "new_shapes", lambda *_: seen.append(list(within)) or {})
    examine(program("clean"), preset="none", steps=4)
    steps, layers = seen
    assert [way.name for way in steps] == ["eager"]
    assert layers == []


def test_checks_of_distributions_are_told_with_their_gain_and_once(program, line_of, monkeypatch):
    timed_as(monkeypatch, {"eager": 8.0, "without checks": 5.0})
    document = examine(program("checked"), preset="none", steps=4)
    (advice,) = [one for one in document["advice"] if one["rule"] == "argument_checks"]
    assert advice["milliseconds"] == pytest.approx(3.0)
    assert advice["line"] == line_of("CHECKED")
    assert "validate_args=False" in advice["change"]
    assert "host_sync" not in [one["rule"] for one in document["advice"]]


def test_a_way_that_is_not_faster_is_not_shown_and_the_read_is_told_as_one(program, monkeypatch):
    timed_as(monkeypatch, {"eager": 8.0, "without checks": 8.0})
    document = examine(program("checked"), preset="none", steps=4)
    assert list(document["measurements"]["ways"]) == ["eager"]
    assert {one["rule"] for one in document["advice"]} == {"host_sync"}


@pytest.mark.parametrize(("unlike", "found"), [(5.0, True), (9.0, False)])
def test_a_difference_is_told_by_pairs_and_only_beyond_its_interval(program, monkeypatch, unlike, found):
    def set_times(examination, ways):
        eager, way = ways
        eager.samples = [size / 1e3 for size in range(1, 9)]
        way.samples = [size * 0.6 for size in eager.samples]
        way.samples[3] *= unlike / 5.0
        way.samples[:2] = [each * unlike / 5.0 for each in way.samples[:2]]

    monkeypatch.setattr(examining._Examination, "_time", set_times)
    document = examine(program("checked"), preset="none", steps=4)
    assert ("argument_checks" in [one["rule"] for one in document["advice"]]) is found


def test_without_checks_nothing_is_offered(program, monkeypatch):
    timed_as(monkeypatch, {"eager": 8.0, "without checks": 5.0})
    document = examine(program("unchecked"), preset="none", steps=4)
    assert list(document["measurements"]["ways"]) == ["eager"]
    assert document["advice"] == []


def test_a_suggested_way_is_not_taken_for_one_that_was_asked_for():
    suggested = {"step_ms": 5.0, "peak_bytes": 2**40, "suggested": True, "cold_seconds": 1e6}
    ways = {"eager": {"step_ms": 8.0, "peak_bytes": 2**30}, "with TF32": suggested}
    assert [one.rule for one in diagnose.diagnose({"measurements": {"ways": ways}})] == ["tf32_off"]


# -- waits ---------------------------------------------------------------------------------------------------------------


def read_at(line, seconds=1e-6):
    return HostSync(file=__file__, line=line, source="", reason="a value is read", seconds=seconds)


@pytest.fixture
def slow_clock(monkeypatch):
    """Let each read take a second by the clock of the waits."""
    ticks = iter(range(1_000))
    monkeypatch.setattr(host_waits.time, "perf_counter", lambda: next(ticks))


def test_a_wait_is_the_one_of_a_step_in_which_reads_alone_are_looked_at(slow_clock):
    x = torch.ones(3, requires_grad=True)
    first = test_a_wait_is_the_one_of_a_step_in_which_reads_alone_are_looked_at.__code__.co_firstlineno + 5

    def step():
        loss = (x * 2).sum()
        loss.item()  # the first line that reads
        if loss > 0:
            float(loss.detach()), loss.tolist()

    lines = [number for number, text in enumerate(inspect.getsource(step).splitlines(), first - 1)]
    reads = [read_at(line) for line in lines]
    found = [event.seconds for event in with_waits(reads, step)]
    assert found == [1e-6, 1e-6, 1, 1, 2]


def test_a_line_of_two_reads_and_reads_without_a_time_stay_as_they_were(slow_clock):
    line = inspect.currentframe().f_lineno + 1
    step = lambda: torch.ones(1).item()  # noqa: E731 - one line is to read
    twice = [read_at(line), dataclasses.replace(read_at(line), reason="another")]
    assert with_waits(twice, step) == twice
    untimed = [read_at(line, None)]
    assert with_waits(untimed, pytest.fail) == untimed
    assert with_waits([read_at(line)], step)[0].seconds == 1


# -- shapes ------------------------------------------------------------------------------------------------------------


def shapes_of(batches, run, steps=8, known=()):
    program = Workload(nn.Linear(1, 1), None, lambda _: None, batches)
    return new_shapes(program, program.endless(), run, steps, set(known))


def test_the_first_step_of_each_shape_is_held_against_the_same_batch_run_again(monkeypatch):
    met = []

    def seconds(_run, batch):
        met.append(len(batch))
        return 0.03 if met.count(len(batch)) == 1 else 0.02

    monkeypatch.setattr(outside, "_seconds", seconds)
    found = shapes_of([torch.zeros(size) for size in range(1, 9)] * 2, None, steps=16)
    assert met == [size for size in range(1, 9) for _ in range(2)]
    assert (found["steps"], found["shapes"]) == (16, 8)
    assert found["extra_ms_low"] == pytest.approx(10.0)
    assert found["extra_seconds"] == pytest.approx(0.08)
    (advice,) = rules({"new_shapes": found, "ways": {"eager": {"step_ms": 20.0}}}, "new_shapes")
    assert "8 of 16 batches" in advice.what
    assert advice.seconds == found["extra_seconds"]
    assert rules({"new_shapes": found, "ways": {"eager": {"step_ms": 1e3}}}, "new_shapes") == []


def test_batches_of_one_shape_are_not_run():
    ran = []
    assert shapes_of([torch.zeros(3)] * 4, ran.append) == {}
    assert len(ran) == 2
    assert shapes_of(iter([torch.zeros(3)]), ran.append) == {}


def test_shapes_that_cost_nothing_extra_are_no_advice():
    figures = {"steps": 8, "shapes": 8, "extra_ms": 0.2, "extra_ms_low": -0.1, "extra_seconds": 0.002}
    assert rules({"new_shapes": figures, "ways": {"eager": {"step_ms": 1.0}}}, "new_shapes") == []
