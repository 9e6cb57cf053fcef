"""Sizes by aspect ratio: what they promise for any pictures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.recipes.diffusion import buckets

SHAPES = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=60)


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, step=st.sampled_from([1, 8, 16, 64]), times=st.integers(1, 12), most=st.integers(1, 9),
       least=st.integers(1, 20))  # fmt: skip
def test_a_plan_is_bounded_and_each_picture_has_the_nearest_size(shapes, step, times, most, least):
    plan = buckets.plan(shapes, step * times, step, most, least)
    assert len(plan.sizes) == len(set(plan.sizes)) <= most
    areas = [high * wide for high, wide in plan.sizes]
    assert areas == sorted(areas)
    assert max(areas) <= (step * times) ** 2
    assert all(side % step == 0 and side > 0 for size in plan.sizes for side in size)
    counts = plan.bucket.bincount(minlength=len(plan.sizes)).tolist()
    assert sum(counts) == len(shapes)
    assert len(plan.sizes) == 1 or min(counts) >= least
    for (high, wide), mine, cut in zip(shapes, plan.bucket.tolist(), plan.cut.tolist(), strict=True):
        away = [abs(math.log(wide / high) - math.log(one[1] / one[0])) for one in plan.sizes]
        assert away[mine] == pytest.approx(min(away), abs=1e-9)
        assert cut == pytest.approx(1 - math.exp(-away[mine]), abs=1e-9)
        assert 0 <= cut < 1


def test_the_sizes_of_stable_diffusion():
    found = buckets.candidates(512, 64)
    assert {(512, 512), (448, 576), (576, 448), (384, 640), (256, 1024), (1024, 256)} <= set(found)
    assert all(high * wide <= 512 * 512 for high, wide in found)
    ratios = [wide / high for high, wide in found]
    assert ratios == sorted(ratios)


def test_a_few_pictures_of_a_rare_ratio_go_to_the_neighbour():
    shapes = [(512, 512)] * 20 + [(448, 576)] * 20 + [(1024, 256)] * 3
    plan = buckets.plan(shapes, 512, 64, 8, 4)
    assert set(plan.sizes) == {(512, 512), (448, 576)}
    assert {plan.sizes[row] for row in plan.bucket[-3:].tolist()} == {(512, 512)}
    assert float(plan.cut[-1]) == pytest.approx(0.75)
    both = buckets.plan(shapes, 512, 64, 8, 3)
    assert (1024, 256) in both.sizes
    assert float(both.cut.max()) == 0
