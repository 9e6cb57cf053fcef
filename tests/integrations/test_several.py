"""What the integrations need of several processes: who speaks, and the stream that a wrapper is made on."""

import logging
import types

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import distributed as dist

from hotloop.integrations import several
from hotloop.integrations.lightning.ownership import obstacles
from hotloop.step.tiers import tier_of_setting


@pytest.mark.parametrize(("rank", "said"), [(0, ["alike", "worse", "after"]), (1, ["worse", "after"])])
def test_what_all_processes_say_alike_is_said_by_the_first(monkeypatch, caplog, rank, said):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    log = logging.getLogger("hotloop")
    with several.first_speaks():
        log.warning("alike")
        log.error("worse")
    log.warning("after")
    assert [line.getMessage() for line in caplog.records] == said
    assert several.level_of(logging.WARNING) == (logging.DEBUG if rank else logging.WARNING)


class Sliced(DDPStrategy):
    """A strategy of somebody's own, which may do anything within a step."""


@pytest.mark.parametrize(
    ("strategy", "run", "why"),
    [
        (FSDPStrategy, "eager+graph", f"FSDPStrategy: {several.FLAT}, by ModelParallelStrategy"),
        (ModelParallelStrategy, "inductor+graph", f"ModelParallelStrategy: {several.UNCOMPILED}"),
        (
            ModelParallelStrategy,
            "full",
            "ModelParallelStrategy runs the step on several devices, or in a way of its own",
        ),
        (FSDPStrategy, "full", "FSDPStrategy runs the step on several devices, or in a way of its own"),
        (DDPStrategy, "full", "DDPStrategy runs the step on several devices, or in a way of its own"),
        (FSDPStrategy, "auto", f"FSDPStrategy: {several.FLAT}, by ModelParallelStrategy"),
        (Sliced, "eager+graph", "Sliced runs the step on several devices, or in a way of its own"),
    ],
)
def test_strategies_that_no_loop_owns_the_step_of_are_named_with_the_reason(strategy, run, why):
    trainer = types.SimpleNamespace(
        strategy=strategy(), callbacks=[], precision_plugin=Precision(), accumulate_grad_batches=1
    )
    assert obstacles(trainer, BoringModel(), tier_of_setting(run)) == [why]
