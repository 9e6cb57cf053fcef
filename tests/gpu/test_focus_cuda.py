"""Recipe `focus` on real CUDA graphs: the small networks captured in training and in the allocator, and the whole step."""

import math
import statistics

import pytest
import torch

import hotloop
from hotloop.recipes import focus

STEPS, LATE = 1000, 200

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.inductor,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # Inductor suggests TF32 on such a card, and uses deprecated parts of torch: an error there would break a lowering.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def trained(seed, preset=None, run=None):
    """Train, and read a text alone after every tenth step; gives the losses, and what is left to look at."""
    torch.manual_seed(0)
    workload = focus.make()
    if preset is not None:
        hotloop.compile(dict(workload.model), preset)
    loop = None
    if run is not None:
        loop = hotloop.Loop(workload.model, workload.optimizer, state=workload.state, run=run, total_steps=STEPS)
    step = loop.step(workload.step) if loop else workload.step
    torch.manual_seed(seed)
    losses, kept = [], []
    for number, batch in zip(range(STEPS), workload.endless(), strict=False):
        losses.append(step(*batch)["loss"])
        if number % 10 == 0:
            scores, *_ = workload.infer(*batch)
            kept.append((scores, scores.clone()))
    assert all(torch.equal(one, copy) for one, copy in kept), "a later call has overwritten what was kept"
    return [float(loss) for loss in losses], workload, loop


def late(losses):
    return statistics.fmean(losses[-LATE:])


@pytest.fixture(scope="module")
def eager():
    return [trained(seed)[0] for seed in (1, 2, 3)]


def within_noise(found, eager):
    """A choice of the allocator's that differs by rounding makes another run: one more of a few seeds, so to speak.

    The bounds hold 99% of further draws beside three (Student's t with two degrees of freedom: 9.92).
    """
    half = 9.92 * statistics.stdev(eager) * math.sqrt(1 + 1 / len(eager))
    return abs(found - statistics.fmean(eager)) <= half


def same_as(losses, eager):
    """Hold a run to the one of its own seed at the first step, which begins from the same state, and late to all."""
    assert losses[0] == pytest.approx(eager[0][0], rel=1e-3)
    seeds = [late(one) for one in eager]
    assert within_noise(late(losses), seeds), (late(losses), seeds)


def test_a_thousand_steps_with_capture_on_in_training_and_inference(eager):
    losses, workload, _ = trained(1, "reduce-overhead")
    same_as(losses, eager)
    for name, part in hotloop.status(dict(workload.model)).components.items():
        assert part.state == "compiled", (name, part)
        assert not part.cudagraphs_skipped, (name, part)
        assert part.modes["training"]["calls_per_step"] == {"1": STEPS}
        assert part.modes["inference"]["calls"] > 0


def test_a_thousand_steps_with_auto(eager):
    losses, _, loop = trained(1, run="auto")
    same_as(losses, eager)
    status = loop.status()
    loop.close()
    assert sum(one.steps for one in status.tiers) == STEPS
    assert any("graph" in one.name and one.steps for one in status.tiers), status


def test_the_harness_passes():
    found = hotloop.harness("hotloop.recipes.focus:make", "reduce-overhead", rounds=8)
    assert not found.emulated
    assert found.passed, str(found)
