"""Programs that once trained otherwise with hotloop than without train as eager does.

Faults that have an equal test elsewhere:

| fault | test |
|---|---|
| a proof passes gradients that it never saw (LoRA's B = 0) | `step/prove/test_step_unseen.py` |
| equal random draws are merged, and `verify` compiles otherwise | `compiling/fallback/test_random_draws.py` |
| an optimizer that uses its closure in Lightning | `integrations/test_lightning_closures.py` |
| copies of a Lightning Trainer, a pickled HotTrainer | `integrations/test_copied_callbacks.py` |
| a ninth shape is never captured | `step/calls/test_step_shapes.py` |
| seconds saved compare two kinds of calls | `step/loop/test_step_saved.py` |
| a record without `close()` | `step/loop/test_step_record.py` |
| remedies: SAM, `.data = `, a sparse gradient, BatchNorm under a checkpoint | `step/audit/test_step_remedies_of_training.py` |
| checkpoints every so many minutes, torn settings | `train/test_train_faults.py` |
"""

from __future__ import annotations

import queue
import random
import threading

import pytest
import torch
from fault_programs import COMPILED, PROGRAMS, loss_function_of_a_library, run

from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program
from hotloop.step.state.snapshot import Snapshot

_SLOW = [make for make, (mode, _) in PROGRAMS.items() if mode == COMPILED[0]] + [loss_function_of_a_library]


@pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=make.__name__, marks=[pytest.mark.campaign] * (make in _SLOW)) for make in PROGRAMS],
)
def test_a_program_trains_as_eager_does(make):
    mode, in_force = PROGRAMS[make]
    expected, _ = run(make, "eager")
    actual, tier = run(make, mode)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert tier == in_force


def test_what_draws_nothing_sets_no_random_stream_back():
    """Another thread's loader draws meanwhile, during a proof as during a step that is rescued."""
    model = torch.nn.Linear(2, 2)
    holdings = Holdings({"model": model}, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    program = Program(lambda: None, holdings, torch.device("cpu"), lambda: False)
    program.rng_usage.note(set())
    start = Snapshot(program, everything=False)
    start.save(gradients=True)
    snapshot, drawn, asked, done = Snapshot(program), list[float](), queue.SimpleQueue(), queue.SimpleQueue()

    def loader():
        while asked.get():
            done.put(random.random())

    thread = threading.Thread(target=loader)
    thread.start()
    for restore in (lambda: None, snapshot.restore, start.restore):
        restore()
        asked.put(True)
        drawn.append(done.get(timeout=30))
    asked.put(False)
    thread.join()
    assert len(set(drawn)) == len(drawn)
