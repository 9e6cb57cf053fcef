"""`hotloop.verify`: right compiles pass, a backward that is wrong by 0.001% fails, and the region at fault is named."""

from __future__ import annotations

import dataclasses
import functools
import json
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from verify_programs import Net, batches, workload, wrong

import hotloop
from hotloop._torch import backends
from hotloop.errors import ConfigError, HotloopError

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "settings",
    [{}, {"dropout": 0.3}, {"autocast": BF16}, {"autocast": BF16, "dropout": 0.3}, {"autocast": torch.float16}],
    ids=["float32", "dropout", "bfloat16", "bfloat16 dropout", "float16"],
)
def test_right_code_passes_against_float64(settings):
    verdict = hotloop.verify(workload(**settings), "aot_eager")
    assert verdict.passes, verdict
    assert verdict.reference == "float64"
    assert verdict.why == ""
    assert verdict.blamed is None
    assert len(verdict.steps) == 3
    assert verdict.compute_dtype == str(settings.get("autocast", torch.float32)).removeprefix("torch.")


@pytest.fixture(scope="module")
def found():
    """The verdict on a backward of gelu that is wrong by 0.001%."""
    with wrong("aten.gelu_backward", 1.00001) as planted:
        verdict = hotloop.verify(workload(dropout=0.3), "aot_eager")
    assert planted
    return verdict


@pytest.mark.campaign
def test_a_backward_that_is_wrong_by_a_thousandth_of_a_percent_is_found_and_named(found):
    verdict = found
    assert not verdict.passes
    assert "blocks.1" in verdict.why
    assert [one.path for one in verdict.blamed.regions] == ["model.blocks.1.act"]
    region = verdict.blamed.regions[0]
    assert region.kind == "GELU"
    assert region.file.endswith("activation.py")


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_gradients_that_the_step_zeroes_in_place_are_compared_as_the_optimizer_found_them(factor, monkeypatch):
    """Under bfloat16 the update of Adam hides the size of gradients, and after the step all gradients are zeros."""
    zeroes = functools.partialmethod(torch.optim.Optimizer.zero_grad, set_to_none=False)
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zeroes)
    with wrong("aten.gelu_backward", factor) as planted:
        verdict = hotloop.verify(workload(autocast=BF16), "aot_eager", search=False)
    assert planted
    assert verdict.passes == (factor == 1), str(verdict)
    assert verdict.visible is not None


def test_a_wrong_backward_under_bfloat16_is_found_by_its_slope():
    with wrong("aten.native_batch_norm_backward", 1.01):
        verdict = hotloop.verify(workload(autocast=BF16), "aot_eager", search=False)
    assert not verdict.passes
    assert verdict.worst[0].measure == "slope"


class Functional(nn.Module):
    """A module whose own code is at fault, not a child's."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


def test_a_modules_own_code_is_the_region_where_its_children_agree():
    with wrong("aten.gelu_backward", 1.0001):
        verdict = hotloop.verify(workload(nn.Sequential(nn.LayerNorm(16), Functional())), "aot_eager")
    assert [one.path for one in verdict.blamed.regions] == ["model.1"]
    assert verdict.blamed.regions[0].file == __file__
    assert "its own code" in verdict.blamed.how


@pytest.mark.parametrize("alone", ["compile", "run"])
def test_what_cannot_be_compiled_alone_is_told_and_not_taken_for_innocent(alone):
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 5), nn.LayerNorm(5))
    with wrong("aten.gelu_backward", 1.0001, alone=alone):
        blamed = hotloop.verify(workload(model), "aot_eager").blamed
    assert [one.path for one in blamed.regions] == ["model"]
    untested = blamed.how.partition("Could not be tested alone, and may be at fault: ")[2]
    assert untested.startswith("model.1 (GELU, ")
    assert "not alone" in untested
    assert "model.2" not in untested


def test_a_neighbour_of_what_cannot_be_compiled_alone_is_still_found():
    model = nn.Sequential(nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5))
    with wrong("aten.tanh_backward", 1.0001, alone="run"):
        blamed = hotloop.verify(workload(model), "aot_eager").blamed
    assert [one.path for one in blamed.regions] == ["model.2"]
    assert "model.0 (GELU, " in blamed.how.partition("Could not be tested alone")[2]


def test_a_wrong_forward_fails_in_the_result():
    with wrong("aten.tanh", 1.01):
        verdict = hotloop.verify(workload(), "aot_eager", search=False)
    assert not verdict.passes
    assert verdict.why.startswith("result: ")
    assert verdict.blamed is None


def test_nan_is_told_as_such():
    with wrong("aten.gelu_backward", float("nan")):
        verdict = hotloop.verify(workload(), "aot_eager", search=False)
    assert verdict.worst[0].measure == "finite"
    assert "NaN" in verdict.why
    assert json.loads(json.dumps(verdict.to_dict(), allow_nan=False))["passes"] is False


def test_the_search_ends_when_its_time_does():
    with wrong("aten.gelu_backward", 1.0001):
        verdict = hotloop.verify(workload(), "aot_eager", search_seconds=1e-6)
    assert [one.path for one in verdict.blamed.regions] == ["model"]
    assert "ended" in verdict.blamed.how


def test_the_program_is_as_it_was_afterwards():
    program = workload(dropout=0.2)
    program.run(batches()[0])
    before = {name: one.clone() for name, one in program.holdings().tensors().items()}
    state, python = torch.get_rng_state(), random.getstate()
    with wrong("aten.gelu_backward", 1.0001):
        hotloop.verify(program, "aot_eager", search_seconds=1e-6)
    after = program.holdings().tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())
    assert all(one.dtype == before[name].dtype for name, one in after.items())
    assert torch.equal(state, torch.get_rng_state())
    assert random.getstate() == python
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert hotloop.status(program.model).components["model"].state == "eager"


def test_a_factory_and_its_name_are_taken(tmp_path, monkeypatch):
    assert hotloop.verify(workload, "aot_eager").passes
    with pytest.raises(ConfigError, match="no file"):
        hotloop.verify(f"{tmp_path}/none.py:make")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, "steps 0"),
        ({"steps": True}, "steps True"),
        ({"reference": "float16"}, "reference 'float16'"),
        ({"reference": "float32"}, "for a step in float32 expected one of auto, float64, eager"),
        ({"preset": "none"}, "expected one of aot_eager"),
        ({"preset": "full+graph"}, "a Loop proves captured steps"),
        ({"preset": "nonesuch"}, "nonesuch"),
        ({"preset": 3}, "preset 3"),
        ({"search_seconds": -1}, "search_seconds -1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    preset = settings.pop("preset", "aot_eager")
    with pytest.raises(ConfigError, match=message):
        hotloop.verify(workload(), preset, **settings)


def test_a_model_that_is_compiled_already_is_refused():
    program = workload()
    hotloop.compile(program.model, "aot_eager")
    with pytest.raises(ConfigError, match="compiled already"):
        hotloop.verify(program, "aot_eager")


def test_batches_that_require_gradients_are_refused():
    program = workload()
    program = dataclasses.replace(program, batches=[(x.requires_grad_(), y) for x, y in program.batches])
    with pytest.raises(ConfigError, match="an argument requires gradients"):
        hotloop.verify(program, "aot_eager")


def test_nothing_compiled_is_no_pass(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    verdict = hotloop.verify(workload(), "aot_eager")
    assert not verdict.passes
    assert "not compiled as asked" in verdict.why


def test_a_step_that_does_not_repeat_itself_cannot_be_verified():
    model = Net()
    hidden = torch.Generator()

    def step(x, y):
        loss = F.cross_entropy(model(x + torch.randn(x.shape, generator=hidden)), y)
        loss.backward()
        return loss

    program = hotloop.Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), step, batches())
    with pytest.raises(HotloopError, match="does not repeat itself"):
        hotloop.verify(program, "aot_eager")


class OnlySingle(nn.Module):
    """An operation that somebody wrote for float32 alone."""

    def forward(self, x):
        if x.dtype == torch.float64:
            raise TypeError("no kernel for double")
        return x * 2


def test_without_a_reference_eager_is_one_and_that_is_said():
    model = nn.Sequential(nn.Linear(16, 8), OnlySingle(), nn.Linear(8, 5))
    verdict = hotloop.verify(workload(model), "aot_eager")
    assert verdict.passes
    assert verdict.reference == "eager"
    assert "no kernel for double" in verdict.reference_why
    assert "no kernel for double" in str(verdict)
    with pytest.raises(HotloopError, match="no kernel for double"):
        hotloop.verify(workload(model), "aot_eager", reference="float64")


def test_under_autocast_float32_is_the_next_best_reference():
    model = nn.Sequential(nn.Linear(16, 8), OnlySingle(), nn.Linear(8, 5))
    verdict = hotloop.verify(workload(model, autocast=BF16), "aot_eager")
    assert verdict.passes
    assert verdict.reference == "float32"


def test_a_reference_that_does_not_fit_in_memory_is_not_run(monkeypatch):
    from hotloop.step.prove import wide_reference

    monkeypatch.setattr(wide_reference, "free_bytes", lambda device: 1000)
    verdict = hotloop.verify(workload(), "aot_eager")
    assert verdict.passes
    assert verdict.reference == "eager"
    assert "GiB are free" in verdict.reference_why


def test_code_that_fails_while_it_runs_is_a_failed_check(monkeypatch):
    from hotloop._torch import backends

    def broken(graph, inputs):
        def run(*args):
            raise RuntimeError("illegal kernel")

        return run

    monkeypatch.setattr(backends, "aot_eager", lambda: broken)
    verdict = hotloop.verify(workload(), "aot_eager")
    assert not verdict.passes
    assert "illegal kernel" in verdict.why


def test_an_error_of_the_users_own_reaches_them():
    data = [*batches(3), (torch.ones(4, 3), torch.zeros(4, dtype=torch.long))]  # a batch of another width
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        hotloop.verify(workload(data=data), "aot_eager")


@pytest.mark.campaign
def test_the_verdict_reads_as_a_table_and_as_json(found):
    verdict = found
    text = str(verdict)
    for part in ("fails", "float64", "at fault: model.blocks.1.act", "blocks.1.up.weight"):
        assert part in text
    plain = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert plain["blamed"]["regions"][0]["path"] == "model.blocks.1.act"
    assert plain["reference"] == "float64"
    assert plain["visible"] < 1e-5


@pytest.mark.campaign
@pytest.mark.inductor
def test_inductor_passes_and_a_wrong_lowering_is_found(monkeypatch):
    import torch._inductor.config
    import torch._inductor.decomposition as lowering

    program = workload(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 5)))
    with torch._inductor.config.patch(force_disable_caches=True):
        assert hotloop.verify(program, "inductor").passes
        torch.compiler.reset()
        backward = torch.ops.aten.gelu_backward.default
        right = lowering.decompositions[backward]
        monkeypatch.setitem(
            lowering.decompositions,
            backward,
            lambda g, x, approximate="none": right(g, x, approximate=approximate) * 1.00001,
        )
        lowering.fast_random_decomps.cache_clear()
        verdict = hotloop.verify(program, "inductor", search=False)
        lowering.fast_random_decomps.cache_clear()
    assert not verdict.passes
    assert "gradient of 0." in verdict.why


def test_code_on_a_lower_rung_is_not_what_was_asked_for(monkeypatch):
    """That aot_eager agrees proves nothing about Inductor's kernels."""

    def refuse(*_args):
        raise RuntimeError("planted")

    monkeypatch.setattr(backends, "inductor", lambda *_: refuse)
    verdict = hotloop.verify(workload(), "default", steps=1, reference="eager")
    assert not verdict.passes
    assert "on a lower rung than default" in verdict.why
    assert "planted" in verdict.why
