"""A gist encoder and a lens, trained in batches and asked many times by a greedy allocator, under CUDA graphs."""

import pytest
import torch
from two_networks import ITEMS, PICKS, Ranker, allocator, batches, make, run

import hotloop
from hotloop.errors import StaleOutputError
from hotloop.testing import (
    assert_compiled,
    assert_max_recompiles,
    assert_outputs_owned,
    assert_steps_marked,
    cudagraph_emulation,
)

STEPS = 12


@pytest.fixture(scope="module")
def eager():
    ranker = Ranker()
    return *run(ranker, batches(STEPS)), [p.detach() for p in ranker.optimizer.param_groups[0]["params"]]


def test_trained_and_asked_under_cuda_graphs_everything_equals_eager(eager):
    losses, orders, gists, parameters = eager
    with cudagraph_emulation() as emulation:
        ranker = Ranker().compile()
        with assert_steps_marked(), assert_outputs_owned():
            found = run(ranker, batches(STEPS))
        with assert_max_recompiles(0):
            run(ranker, batches(2))
        assert_compiled({"gist": ranker.gist, "lens": ranker.lens})
        status = hotloop.status({"gist": ranker.gist, "lens": ranker.lens}).components
    assert (found[0], found[1]) == (losses, orders)
    assert all(torch.equal(one, other) for one, other in zip(found[2], gists, strict=True))
    assert emulation.overwritten == emulation.skipped == []
    gist = status["gist"].modes
    assert gist["training"]["calls_per_step"] == {"1": STEPS + 2}
    assert gist["inference"]["calls_per_step"] == {"4": STEPS + 1}  # the last round is followed by no step
    assert gist["inference"]["shapes"] == {"1x12x16, 1x12": 4 * (STEPS + 2)}
    assert gist["training"]["calls_in_backward"] == 0
    assert status["lens"].outputs_copied > 2 * STEPS


def test_parameters_after_training_under_cuda_graphs_are_eagers_bit_by_bit(eager):
    *_, parameters = eager
    with cudagraph_emulation():
        ranker = Ranker().compile()
        run(ranker, batches(STEPS))
    found = ranker.optimizer.param_groups[0]["params"]
    assert all(torch.equal(one, other) for one, other in zip(found, parameters, strict=True))


def test_the_same_program_with_plain_compile_reads_what_was_overwritten():
    with cudagraph_emulation() as emulation:
        ranker = Ranker()
        ranker.gist.compile(backend=emulation.backend)
        ranker.lens.compile(backend=emulation.backend)
        with pytest.raises(StaleOutputError):
            run(ranker, batches(3))
    assert any("two_networks.py" in str(one.output.file) for one in emulation.overwritten)


def test_the_training_is_a_workload_that_runs():
    workload = make()
    epochs = [sum(workload.run(batch).item() for batch in workload.epoch()) for _ in range(3)]
    assert epochs[2] < epochs[0]
    order, _, scores = allocator(workload)(next(workload.epoch()))
    assert len(set(order)) == PICKS
    assert scores.shape == (1, ITEMS)
