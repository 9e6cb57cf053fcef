"""Differences are right for every kind of tensor, and take neither memory nor waits."""

from __future__ import annotations

import importlib
import math

import pytest
import torch

from hotloop.measure import differences

sums_of = importlib.import_module("hotloop.measure.sums")

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def difference(r, c):
    found, mismatches = differences({"x": r}, {"x": c})
    assert not mismatches
    return found["x"]


def fit(r, c):
    """The definitions, as they stand in a textbook."""
    r, c = r.double().flatten(), c.double().flatten()
    slope = (c @ r) / (r @ r)
    return slope.item() - 1, ((c - slope * r).norm() / r.norm()).item(), ((c - r).norm() / r.norm()).item()


@pytest.mark.parametrize("dtype", FLOATS)
def test_slope_residual_and_relative_are_those_of_the_definitions(dtype):
    torch.manual_seed(0)
    r = torch.randn(40, 30).to(dtype)
    c = (r.double() * 1.25 + 0.25 * torch.randn(40, 30)).to(dtype)
    d = difference(r, c)
    assert (d.tilt, d.residual, d.relative) == pytest.approx(fit(r, c), rel=1e-9)
    assert d.slope == abs(d.tilt)
    assert d.max_abs == (c.double() - r.double()).abs().max().item()
    assert d.rms == pytest.approx(r.double().square().mean().sqrt().item())
    assert d.rms_difference == pytest.approx((c.double() - r.double()).square().mean().sqrt().item())
    assert d.dtype == str(dtype).removeprefix("torch.")
    assert (d.numel, d.equal, d.finite) == (1200, False, True)


def test_tensors_measured_together_come_out_as_each_alone(monkeypatch):
    torch.manual_seed(0)
    reference = {str(place): torch.randn(shape) for place, shape in enumerate([(7, 5), (1,), (3, 2, 4), (30, 40)])}
    candidate = {name: one * 1.01 + 0.01 for name, one in reference.items()}
    reference["3"][0, 0], candidate["3"][0, 0] = math.nan, math.nan
    candidate["2"] = candidate["2"].transpose(0, 2).contiguous().transpose(0, 2)
    alone = {name: differences({name: r}, {name: candidate[name]})[0][name] for name, r in reference.items()}
    monkeypatch.setattr(sums_of, "CHUNK", 100)  # several bunches
    monkeypatch.setattr(sums_of, "SEGMENT", 7)
    together, _ = differences(reference, candidate)
    assert list(together) == list(reference)
    for name, one in alone.items():
        for measure in ("tilt", "residual", "relative", "max_abs", "rms", "effective"):
            assert getattr(together[name], measure) == pytest.approx(getattr(one, measure), rel=1e-12, abs=1e-15)


def test_a_tiny_scale_is_not_lost_to_cancellation():
    r = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    d = difference(r, r * (1 + 1e-12))
    assert d.tilt == pytest.approx(1e-12, rel=1e-3)
    assert d.residual < 1e-15


def test_complex_tensors_are_measured_as_pairs_of_reals():
    torch.manual_seed(0)
    r, c = torch.randn(2, 50, dtype=torch.complex64)
    d = difference(r, c)
    assert (d.tilt, d.residual, d.relative) == pytest.approx(fit(torch.view_as_real(r), torch.view_as_real(c)))
    assert d.numel == 50
    assert difference(r.conj(), r.conj().resolve_conj()).equal
    assert difference(torch.randn(3, dtype=torch.complex64).conj().imag, torch.zeros(3)).relative == 1.0  # negative bit


@pytest.mark.parametrize("shape", [(7, 11, 13), (1, 1001), (1001, 1), (1001,), (2, 2, 300)])
def test_chunks_give_what_the_whole_gives_and_hold_no_more_than_they_may(shape, monkeypatch):
    torch.manual_seed(0)
    r, c = (torch.randn(shape).transpose(0, -1) for _ in range(2))
    whole, held = difference(r, c), []
    original = sums_of._float64
    monkeypatch.setattr(sums_of, "CHUNK", 64)
    monkeypatch.setattr(sums_of, "_float64", lambda part: held.append(part.numel()) or original(part))
    parts = difference(r, c)
    assert (parts.tilt, parts.residual, parts.max_abs) == pytest.approx((whole.tilt, whole.residual, whole.max_abs))
    assert max(held) <= 64
    assert sum(held) == 2 * r.numel()
    assert len(held) < 2 * r.numel() / 20  # cut along the longest dimension, not to single rows


@pytest.mark.parametrize("value", [torch.tensor(3.0), torch.empty(0), torch.empty(3, 0, 2), torch.tensor(2)])
def test_scalars_and_empty_tensors(value):
    d = difference(value, value.clone())
    assert d.equal
    assert d.numel == value.numel()
    assert difference(torch.tensor(2.0), torch.tensor(2.5)).tilt == 0.25


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integers_and_bools_are_equal_or_not(dtype):
    r = torch.tensor([0, 1, 1]).to(dtype)
    assert difference(r, r.clone()).equal
    d = difference(r, torch.tensor([0, 1, 0]).to(dtype))
    assert not d.equal
    assert not d.numeric
    assert (d.tilt, d.residual, d.relative, d.max_abs) == (None, None, None, 1.0)


def test_a_reference_of_zeros_has_no_slope():
    d = difference(torch.zeros(4), torch.tensor([0.0, 1e-9, 0.0, 0.0]))
    assert (d.tilt, d.residual, d.relative) == (None, None, math.inf)
    assert difference(torch.zeros(4), -torch.zeros(4)).equal


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("r", "c", "finite", "equal"),
    [
        ([1, NAN, 2], [1, NAN, 2], True, True),
        ([1, NAN, 2], [1, NAN, 3], True, False),
        ([1, INF, -INF], [1, INF, -INF], True, True),
        ([1, 1, 2], [1, NAN, 2], False, False),
        ([1, NAN, 2], [1, 1, 2], False, False),
        ([1, INF, 2], [1, -INF, 2], False, False),
        ([1, INF, 2], [1, NAN, 2], False, False),
        ([NAN, NAN], [NAN, NAN], True, True),
    ],
)
def test_nan_and_infinities_must_stand_in_the_same_places(r, c, finite, equal):
    d = difference(torch.tensor(r, dtype=torch.float32), torch.tensor(c, dtype=torch.float32))
    assert (d.finite, d.equal) == (finite, equal)
    assert all(math.isfinite(each) for each in (d.max_abs, d.rms, d.rms_difference))


def test_sparse_gradients_are_compared_coalesced():
    torch.manual_seed(0)
    rows, values = torch.tensor([[3, 1, 3, 7]]), torch.randn(4, 5)
    r = torch.sparse_coo_tensor(rows, values, (9, 5), check_invariants=True)
    assert difference(r, r.coalesce()).equal
    other = torch.sparse_coo_tensor(torch.tensor([[1, 4]]), torch.randn(2, 5), (9, 5), check_invariants=True)
    d = difference(r, other)
    assert (d.tilt, d.residual, d.relative) == pytest.approx(fit(r.to_dense(), other.to_dense()))
    with_zero = torch.cat([rows, torch.tensor([[0]])], 1), torch.cat([values, torch.zeros(1, 5)])
    explicit_zero = torch.sparse_coo_tensor(*with_zero, (9, 5), check_invariants=True)
    assert difference(r, explicit_zero).equal
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([2, 2, 5])).sum().backward()
    assert difference(embedding.weight.grad, embedding.weight.grad.clone()).equal


X = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("r", "c", "measure", "value", "expected"),
    [
        ({"x": X}, {"x": X.t()}, "shape", "(3, 2)", "(2, 3)"),
        ({"x": X}, {"x": X.double()}, "dtype", "float64", "float32"),
        ({"x": X}, {"x": X.to_sparse()}, "layout", "sparse_coo", "strided"),
        ({"x": X}, {"x": None}, "missing", "None", "a tensor"),
        ({"x": None}, {"x": X}, "missing", "a tensor", "None"),
        ({"x": X}, {}, "missing", "absent", "a tensor"),
        ({}, {"x": X}, "missing", "a tensor", "absent"),
        ({"x": None}, {}, "missing", "absent", "None"),
    ],
)
def test_what_cannot_be_measured_is_named(r, c, measure, value, expected):
    found, (mismatch,) = differences(r, c)
    assert not found
    assert (mismatch.name, mismatch.measure, mismatch.value, mismatch.expected) == ("x", measure, value, expected)


def test_none_on_both_sides_agrees():
    assert differences({"x": None}, {"x": None}) == ({}, ())
