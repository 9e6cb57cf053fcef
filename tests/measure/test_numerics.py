"""Limits separate right from wrong: rounding passes, a wrong factor does not, and what fails is named."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotloop.errors import ConfigError
from hotloop.measure import Comparison, Limits, compare, differences
from hotloop.measure.limits import SPREADS, noise

COMPUTE = ("float64", "float32", "tf32", "bfloat16", "float16")
FLOAT32, BFLOAT16 = Limits.compiled("float32"), Limits.compiled("bfloat16")
TOGETHER = {("all tensors together", "slope")}
EPS = torch.finfo(torch.float32).eps


def gradients(seed=0, scale=1e-3):
    """Twenty matrices and biases, of one scale as a model's gradients are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(256, 64), (64,)] * 10
    return {f"layers.{n}": scale * torch.randn(shape, generator=generator) for n, shape in enumerate(shapes)}


def noisy(tensors, size, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {name: x * (1 + size * torch.randn(x.shape, generator=generator)) for name, x in tensors.items()}


def test_equal_tensors_agree_and_say_so():
    comparison = compare(gradients(), gradients(), FLOAT32)
    assert comparison.agrees
    assert comparison.worst is None
    assert str(comparison) == "20 tensors, all equal"


@pytest.mark.parametrize(("limits", "size"), [(FLOAT32, 1e-6), (FLOAT32, 2e-4), (BFLOAT16, 5e-3), (BFLOAT16, 0.1)])
def test_rounding_agrees_however_much_the_model_magnifies_it(limits, size):
    for seed in range(20):
        comparison = compare(gradients(), noisy(gradients(), size, seed), limits)
        assert comparison.agrees, str(comparison)
        assert 0 < comparison.nearness < 1
        assert comparison.worst.name in str(comparison)


@pytest.mark.parametrize(
    ("limits", "size", "factor"), [(FLOAT32, 1e-6, 1.0001), (FLOAT32, 1e-4, 1.001), (BFLOAT16, 5e-3, 1.01)]
)
def test_a_wrong_factor_in_one_tensor_is_found_and_named(limits, size, factor):
    candidate = noisy(gradients(), size)
    candidate["layers.4"] = candidate["layers.4"] * factor
    comparison = compare(gradients(), candidate, limits)
    first = comparison.failures[0]
    assert {(each.name, each.measure) for each in comparison.failures} - TOGETHER == {("layers.4", "slope")}
    assert comparison.worst.name == first.name == "layers.4"
    assert str(comparison).startswith(f"layers.4: slope off by {factor - 1:.1e}, limit {first.limit:.1e}")


def test_a_bias_has_room_for_its_few_elements():
    reference = {**gradients(), "bias": torch.randn(8, generator=torch.Generator().manual_seed(3)) * 1e-3}
    for seed in range(50):
        assert compare(reference, noisy(reference, 0.02, seed), BFLOAT16).agrees


def test_an_error_that_all_tensors_share_adds_up():
    limits = dataclasses.replace(BFLOAT16, wide=dataclasses.replace(BFLOAT16.wide, base=0.02))
    candidate = {name: x * 1.008 for name, x in noisy(gradients(), 2e-3).items()}
    (failure,) = compare(gradients(), candidate, limits).failures
    assert (failure.name, failure.measure) == ("all tensors together", "slope")
    assert failure.value == pytest.approx(0.008, rel=0.1)


def test_a_step_computed_in_fewer_bits_by_mistake_is_found():
    comparison = compare(gradients(), noisy(gradients(), 5e-3), FLOAT32)
    assert ("all tensors together", "residual") in {(each.name, each.measure) for each in comparison.failures}


def test_one_tensor_of_other_values_is_found_in_an_exact_set():
    candidate = noisy(gradients(), 1e-6)
    candidate["layers.3"] = candidate["layers.3"].flip(0)
    found = {(each.name, each.measure) for each in compare(gradients(), candidate, FLOAT32).failures}
    assert ("layers.3", "residual") in found
    assert {name for name, _ in found} <= {"layers.3", "all tensors together"}


@pytest.mark.parametrize(("limits", "floor"), [(FLOAT32, 1e-6), (BFLOAT16, 2e-3)])
def test_a_gradient_that_is_rounding_itself_is_shown_but_not_judged(limits, floor):
    generator = torch.Generator().manual_seed(0)
    reference, candidate = gradients(), noisy(gradients(), floor)
    reference["key.bias"], candidate["key.bias"] = 1e-3 * floor * torch.randn(2, 64, generator=generator)
    comparison = compare(reference, candidate, limits)
    assert comparison.agrees, str(comparison)
    assert set(comparison.below_floor) == {"key.bias"}
    assert "key.bias" in comparison.differences
    candidate["key.bias"] = candidate["key.bias"] / floor  # now of the size of a gradient: no rounding
    assert not compare(reference, candidate, limits).agrees


def test_small_gradients_are_judged_as_far_as_they_stand_out_of_rounding():
    for size, factor, agrees in ((0.3, 1.01, False), (1e-3, 1.1, True), (1e-3, 50.0, False)):
        reference, candidate = gradients(), noisy(gradients(), 1e-3)
        reference["small"] = reference["layers.0"] * size
        candidate["small"] = candidate["layers.0"] * size * factor
        comparison = compare(reference, candidate, BFLOAT16)
        assert comparison.agrees is agrees
        assert set(comparison.below_floor) == ({"small"} if size == 1e-3 else set())


def test_a_gradient_where_eager_has_exactly_none():
    reference = {**gradients(), "unused": torch.zeros(64)}
    assert compare(reference, {**gradients(), "unused": torch.full((64,), 1e-12)}, FLOAT32).agrees
    (failure,) = compare(reference, {**gradients(), "unused": torch.full((64,), 1e-3)}, FLOAT32).failures
    assert str(failure) == "unused: relative difference 1.0e+00, limit 6.4e-05"
    (failure,) = compare({"unused": torch.zeros(64)}, {"unused": torch.ones(64)}, FLOAT32).failures
    assert failure.to_dict() == {"name": "unused", "measure": "relative", "value": None, "limit": FLOAT32.wide.floor}


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        ({"w": None}, "w: is None, the reference a tensor"),
        ({}, "w: is absent, the reference a tensor"),
        ({"w": torch.ones(3, 2)}, "w: shape (3, 2), the reference has (2, 3)"),
        ({"w": torch.ones(2, 3, dtype=torch.half)}, "w: dtype float16, the reference has float32"),
        ({"w": torch.full((2, 3), torch.nan)}, "w: NaN or infinite in other places than the reference"),
    ],
)
@pytest.mark.parametrize("limits", [Limits.rounding(), FLOAT32])
def test_what_has_no_measure_fails_and_says_why(limits, candidate, message):
    comparison = compare({"w": torch.ones(2, 3)}, candidate, limits)
    assert not comparison.agrees
    assert str(comparison) == message


def test_integers_must_be_equal():
    (failure,) = compare({"steps": torch.tensor([3])}, {"steps": torch.tensor([4])}, Limits.rounding()).failures
    assert str(failure) == "steps: not equal, by up to 1.0e+00"


def test_nan_in_the_same_places_agrees():
    x = torch.tensor([1.0, torch.nan, torch.inf])
    assert compare({"loss": x}, {"loss": x.clone()}, FLOAT32).agrees


def test_overflow_in_the_sums_is_no_agreement():
    x = torch.full((4,), 1e300, dtype=torch.float64)
    assert not compare({"x": x}, {"x": x * 2}, Limits.compiled("float64")).agrees


def test_several_failures_are_said_in_one_line():
    comparison = compare(gradients(), {name: x * 2 for name, x in gradients().items()}, FLOAT32)
    assert str(comparison).endswith(f"; and {len(comparison.failures) - 3} more")
    assert "\n" not in str(comparison)
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    assert document["agrees"] is False
    assert len(document["failures"]) == len(comparison.failures)


# eager + graph


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [(torch.float32, 4 * EPS, 64 * EPS), (torch.float64, 4 * EPS, 64 * EPS), (torch.bfloat16, 2**-9, 2**-5)],
)
def test_the_same_kernels_may_differ_by_a_few_ulp(dtype, right, wrong):
    reference = {name: x.double() for name, x in gradients(scale=0.02).items()}
    for size, agrees in ((right, True), (wrong, False)):
        sides = [
            {name: x.to(dtype) for name, x in tensors.items()}
            for tensors in (reference, {name: x * (1 + size) for name, x in reference.items()})
        ]
        assert compare(*sides, Limits.rounding()).agrees is agrees


def test_a_bias_that_started_at_zero_is_held_against_the_set():
    """Its value is one update, in which Adam's 1 - beta2 in float32 is wrong by 1.5e-5."""
    reference = {**gradients(scale=0.02), "bias": torch.full((64,), -1e-3)}
    candidate = {**reference, "bias": reference["bias"] * (1 + 1.5e-5)}
    assert compare(reference, candidate, Limits.rounding()).agrees
    candidate["bias"] = reference["bias"] * 1.01  # a learning rate wrong by 1%
    assert not compare(reference, candidate, Limits.rounding()).agrees


def test_capturable_adam_is_within_the_limits_of_adam():
    torch.manual_seed(0)
    one, other = ({name: nn.Parameter(x) for name, x in gradients(scale=0.02).items()} for _ in range(2))
    one["bias"], other["bias"] = (nn.Parameter(torch.zeros(64)) for _ in range(2))
    plain = torch.optim.AdamW(one.values(), lr=1e-3)
    step = types.SimpleNamespace(t=0)
    for _ in range(3):
        step.t += 1
        grads = {name: torch.randn(p.shape) for name, p in one.items()}
        for name, p in one.items():
            p.grad = grads[name]
        plain.step()
        adamw_in_float32_scalars(other, grads, step.t, plain.state, one)
        assert compare(one, other, Limits.rounding()).agrees


def adamw_in_float32_scalars(parameters, grads, t, state, twins):
    """What capturable does: learning rate, step and bias corrections are float32 tensors. CPUs refuse capturable."""
    lr, t = torch.tensor(1e-3), torch.tensor(float(t))
    corrections = [1 - torch.tensor(beta) ** t for beta in (0.9, 0.999)]
    with torch.no_grad():
        for name, p in parameters.items():
            p.mul_(1 - lr * 0.01)
            moments = state[twins[name]]
            denominator = (moments["exp_avg_sq"] / corrections[1]).sqrt() + 1e-8
            p.sub_(lr / corrections[0] * moments["exp_avg"] / denominator)


def test_spread_widens_the_limits_for_tensors_that_eager_itself_spreads():
    reference = gradients()
    spread, _ = differences(reference, noisy(reference, 1e-4, seed=5))
    candidate = noisy(reference, 1e-4, seed=6)
    assert not compare(reference, candidate, Limits.rounding()).agrees
    assert compare(reference, candidate, Limits.rounding(), spread=spread).agrees
    candidate = noisy(reference, 2 * SPREADS * 1e-4, seed=6)
    assert not compare(reference, candidate, Limits.rounding(), spread=spread).agrees


def test_a_spread_over_zeros_allows_no_more_than_it_spread():
    reference = {**gradients(), "unused": torch.zeros(64)}
    spread, _ = differences(reference, {**gradients(), "unused": torch.full((64,), 1e-7)})
    for value, agrees in ((2e-7, True), (1e-5, False)):
        candidate = {**gradients(), "unused": torch.full((64,), value)}
        assert compare(reference, candidate, Limits.rounding(), spread=spread).agrees is agrees


def test_spread_widens_compiled_limits_too():
    reference = {"a": torch.randn(1000), "b": torch.randn(1000)}
    spread, _ = differences(reference, noisy(reference, 0.01, seed=5))
    candidate = noisy(reference, 0.01, seed=6)
    assert not compare(reference, candidate, FLOAT32).agrees
    assert compare(reference, candidate, FLOAT32, spread=spread).agrees


def test_a_scalar_that_happened_not_to_spread_has_the_sets_spread():
    reference = {**gradients(), "loss": torch.tensor(2.0)}
    spread, _ = differences(reference, {**noisy(gradients(), 1e-4), "loss": torch.tensor(2.0)})
    assert spread["loss"].equal
    candidate = {**gradients(), "loss": torch.tensor(2.0 * (1 + 3e-4))}
    assert compare(reference, candidate, Limits.rounding(), spread=spread).agrees


# updates of an optimizer


def test_updates_of_random_sign_are_not_judged_alone():
    """Adam makes a full step of a gradient that is rounding, in a random direction."""
    limits = Limits.compiled("float32", updates=True)
    generator = torch.Generator().manual_seed(0)
    reference, candidate = gradients(), noisy(gradients(), 1e-6)
    reference["key.bias"], candidate["key.bias"] = 1e-3 * torch.randn(2, 64, generator=generator).sign()
    comparison = compare(reference, candidate, limits)
    assert str(comparison) == "21 tensors agree, judged all together"
    assert not compare(reference, candidate, FLOAT32).agrees
    candidate["key.bias"] = torch.zeros(64)  # a gradient under Adam's eps in one run, over it in the other
    assert compare(reference, candidate, limits).agrees


@pytest.mark.parametrize(("compute", "size", "factor"), [("float32", 1e-6, 1.001), ("bfloat16", 0.2, 1.1)])
def test_updates_by_a_wrong_learning_rate_are_found(compute, size, factor):
    limits = Limits.compiled(compute, updates=True)
    candidate = noisy(gradients(), size)
    assert compare(gradients(), candidate, limits).agrees
    wrong = compare(gradients(), {name: x * factor for name, x in candidate.items()}, limits)
    assert "all tensors together" in {each.name for each in wrong.failures}


# where the limits come from


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("updates", [False, True])
def test_every_compute_dtype_has_limits(compute, updates):
    limits = Limits.compiled(compute, updates=updates)
    for figures in (limits.wide, limits.half):
        assert all(value > 0 for value in dataclasses.astuple(figures))


def test_limits_of_what_is_not_known_are_refused():
    with pytest.raises(
        ConfigError, match="compute_dtype='int8': expected one of bfloat16, float16, float32, float64, tf32"
    ):
        Limits.compiled("int8")


def test_every_entry_says_how_it_was_come_by():
    document = noise()
    assert {"date", "machine", "torch", "command"} <= document.keys()
    for entry in document["entries"]:
        assert entry["how"]
        assert entry["derived"] is (entry["compute"] in {"tf32", "float16"})
        assert entry["derived"] or sum(row["tensors"] for row in entry["distribution"]) > 100


def test_the_limits_hold_what_was_measured_on_the_gpu():
    path = pathlib.Path(__file__).parents[2] / "benchmarks/results/2026-11-20-h200-presets.json"
    slopes = [row["slope"] for row in json.loads(path.read_text())["rows"] if "slope" in row]
    assert BFLOAT16.wide.base >= max(slopes)


def test_limits_for_half_are_taken_where_a_tensor_is_held_so():
    assert BFLOAT16.figures({"float32"}) is BFLOAT16.wide
    assert BFLOAT16.figures({"float32", "bfloat16"}) is BFLOAT16.half


# real compiles


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)
        self.factor = torch.tensor(1.0)  # one kernel for all factors

    def forward(self, x):
        y = F.gelu(self.up(x))
        return F.mse_loss(self.norm(x + self.down(y + (self.factor - 1) * (y - y.detach()))), x.roll(1, 0))


def step(model, run, x, autocast):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        loss = run(x)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def compiled_against_eager(backend, factor, *, autocast=False, dtype=torch.float32) -> Comparison:
    torch.manual_seed(0)
    eager = Net().to(dtype)
    other = copy.deepcopy(eager)
    other.factor = torch.tensor(factor)
    x = torch.randn(128, 64, dtype=dtype)
    run = torch.compile(other, backend=backend)
    low = autocast or dtype is torch.bfloat16
    return compare(step(eager, eager, x, autocast), step(other, run, x, autocast), BFLOAT16 if low else FLOAT32)


@pytest.mark.campaign
@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.inductor)]
)
@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, (1.01, 1.001, 1.0001)),
        ({"autocast": True}, (1.01,)),
        ({"dtype": torch.bfloat16}, (1.01,)),
    ],
)
@pytest.mark.some_of(2)
def test_an_honest_compile_agrees_and_a_wrong_gelu_does_not(backend, options, factors):
    right = compiled_against_eager(backend, 1.0, **options)
    assert right.agrees, str(right)
    for factor in factors:
        wrong = compiled_against_eager(backend, factor, **options)
        assert {each.name for each in wrong.failures} >= {"up.weight"}, str(wrong)
