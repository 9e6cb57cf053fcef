"""The workloads that are hard to capture are what they are named for, and two of one name are equal."""

import pytest
import torch

from benchmarks.suite import plan
from benchmarks.suite.workloads import MAKERS, build


def losses(name):
    program = build(name, "cpu", "cpu")
    torch.manual_seed(2)
    return [float(program.step(*program.batch(index)).detach()) for index in range(3)]


@pytest.mark.parametrize("name", ["speech", "ppo", "vae", "lstm"])
def test_a_program_trains_and_is_built_alike(name):
    if plan.missing(name):
        pytest.skip(plan.missing(name))
    first = losses(name)
    assert first == losses(name)
    assert len(set(first)) == 3
    assert all(torch.isfinite(torch.tensor(first)))


@pytest.mark.parametrize("name", ["resnet50", "convnext"])
def test_pictures_need_torchvision(name):
    if plan.missing(name):
        assert "torchvision" in plan.missing(name)
        with pytest.raises(ImportError):
            build(name, "cpu", "cpu")
        return
    assert len(set(losses(name))) == 3


def test_every_planned_workload_can_be_built():
    assert {row.workload for row in plan.gpu()} <= set(MAKERS)
