"""The harness on real CUDA graphs: two networks, trained and asked by an allocator between the steps."""

import sys
from pathlib import Path

import pytest
import torch

import hotloop

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
from two_networks import Ranker, batches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def make():
    ranker = Ranker("cuda")
    models = (ranker.gist, ranker.lens)
    given = batches(8, "cuda")
    return hotloop.Workload(
        models, ranker.optimizer, ranker.step, given, infer=lambda items, chosen, target: ranker.allocate(items[:1])
    )


def test_two_networks_are_safe_under_reduce_overhead_with_capture_on():
    found = hotloop.harness(make, "reduce-overhead", rounds=10)
    assert not found.emulated
    assert found.passed, str(found)
    assert found.held, "the allocator holds a gist over the call of the lens"
    for part in found.components.values():
        assert part["state"] == "compiled"
        assert not part["cudagraphs_skipped"]


def test_inference_alone():
    found = hotloop.harness(make, "none", inference="reduce-overhead")
    assert found.passed, str(found)
