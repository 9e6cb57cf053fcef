"""Limits separate right from wrong: rounding passes, a wrong factor does not, and what fails is named."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hotloop.errors import ConfigError
from hotloop.measure import Comparison, Limits, compare, differences
from hotloop.measure.limits import SPREADS

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


def test_a_step_computed_in_fewer_bits_by_mistake_is_found():
    comparison = compare(gradients(), noisy(gradients(), 5e-3), FLOAT32)
    assert ("all tensors together", "residual") in {(each.name, each.measure) for each in comparison.failures}


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


def test_spread_widens_the_limits_for_tensors_that_eager_itself_spreads():
    reference = gradients()
    spread, _ = differences(reference, noisy(reference, 1e-4, seed=5))
    candidate = noisy(reference, 1e-4, seed=6)
    assert not compare(reference, candidate, Limits.rounding()).agrees
    assert compare(reference, candidate, Limits.rounding(), spread=spread).agrees
    candidate = noisy(reference, 2 * SPREADS * 1e-4, seed=6)
    assert not compare(reference, candidate, Limits.rounding(), spread=spread).agrees


# updates of an optimizer


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
