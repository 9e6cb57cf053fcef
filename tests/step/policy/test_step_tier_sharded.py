"""A tier that was named and that sharded parameters rule out is said as a warning, whatever the log level."""

import logging
import types

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import hotloop
from hotloop.step.policy import initial
from hotloop.step.policy.policy import Fixed
from hotloop.step.tiers import parse
from hotloop.testing import captured_step_emulation


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loop_of(model, run):
    with captured_step_emulation():
        loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters(), foreach=False), run=run)
    status = loop.status()
    loop.close()
    return status


def offloaded():
    return fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))


@pytest.mark.parametrize("run", ["auto", "eager+graph"])
def test_a_named_tier_that_is_left_out_is_a_warning(caplog, run):
    with caplog.at_level(logging.WARNING, "hotloop"):
        status = loop_of(offloaded(), run)
    assert status.tier == "eager"
    (why,) = status.decisions
    assert "parameters are sharded (FSDP2), and fully_shard(offload_policy=CPUOffloadPolicy())" in why
    said = [one.getMessage() for one in caplog.records]
    assert bool(said) == (run != "auto")
    assert all("run='eager+graph': parameters are sharded (FSDP2)" in one for one in said)


@pytest.mark.parametrize("run", ["channels_last", "channels_last+graph"])
def test_layouts_of_sharded_parameters_are_left_out(run):
    status = loop_of(fully_shard(nn.Sequential(nn.Conv2d(2, 2, 3))), run)
    assert status.tier == "eager"
    assert "their layout stays as it is: an uncompiled model takes run='eager+graph'" in status.decisions[0]


def test_parameters_that_dtensor_alone_spreads_are_left_out():
    model = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    assert "by DTensor alone (tensor parallelism)" in loop_of(model, "eager+graph").decisions[0]


@pytest.mark.parametrize("run", ["eager+graph", "full", "regional", "aot_eager"])
def test_a_graph_and_compiled_code_of_sharded_parameters_stay(run):
    assert loop_of(fully_shard(nn.Linear(4, 4)), run).tier == run


@pytest.mark.campaign
def test_each_call_of_a_tier_that_compiles_begins_at_rest():
    """An evaluation leaves the root's parameters whole."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).relu()

    model = fully_shard(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    rested = []

    def step(x):
        found = isinstance(model.inner.weight, DTensor)
        model(x).sum().backward()
        return found

    for run, calls in (("eager", 1), ("aot_eager", 6)):
        loop = hotloop.Loop(model, optimizer, run=run)
        train_step = loop.step(step)
        for _ in range(calls):
            with torch.no_grad():
                model(torch.ones(1, 4))
            rested.append(train_step(torch.ones(1, 4)))
        assert loop.last_ran() == (run, "run")
        loop.close()
    assert rested == [False, *[True] * 6]


def test_auto_of_several_processes_meets_nobody_where_nothing_can_be_captured():
    decided = []
    context = types.SimpleNamespace(
        reports=types.SimpleNamespace(decided=lambda why, _: decided.append(why)),
        base_tier=parse("eager"),
        engine=None,
        device="cpu",
        parts=types.SimpleNamespace(wrappers=list, sharded=lambda: True),
    )
    policy = initial._auto_of_several(context, types.SimpleNamespace(size=2), 0.01)
    assert isinstance(policy, initial.Fixed)
    assert "nothing can be captured on cpu" in decided[0]


def test_auto_of_one_process_tries_no_compiled_tier_of_sharded_parameters():
    model = fully_shard(nn.Linear(4, 4))
    with captured_step_emulation():
        loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters()))
    policy = loop.transitions.policy
    assert not isinstance(policy, Fixed)
    assert set(policy.candidates.names()) == {"eager", "eager+graph"}
    loop.close()


@pytest.mark.campaign
def test_a_comparison_of_own_code_loses_no_whole_gradient_that_is_kept():
    """The step compiles a part itself, and in the calls that would compare it uses no gradient that is kept."""

    def trained(run):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4))
        loop = hotloop.Loop(model, torch.optim.AdamW(model.parameters()), run=run)
        doubled = torch.compile(lambda x: 2 * x, backend="eager")

        @loop.step
        def step(x, trains):
            if trains:
                model(doubled(x)).sum().backward()
            return doubled(x)

        for number in range(16):
            model.set_requires_gradient_sync(number < 7)
            step(torch.ones(1, 4), trains=number <= 7)
        model.set_requires_gradient_sync(True)
        model(torch.ones(1, 4)).sum().backward()
        loop.close()
        return model.weight.grad.to_local()

    given = [trained(run) for run in ("eager", "aot_eager")]
    assert torch.equal(*given)


def test_blocks_of_torchs_own_classes_say_what_to_write():
    """Dynamo skips frames of torch.nn, which it inlines elsewhere: between two hooks the forward is such a frame."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    fully_shard(model[0])
    loop = hotloop.Loop(fully_shard(model), torch.optim.AdamW(model.parameters()), run="aot_eager")
    step = loop.step(lambda x: model(x).sum().backward())
    for _ in range(6):
        step(torch.ones(2, 4))
    told = [one.why for one in loop.status().tiers if one.state == "declined"]
    loop.close()
    assert "between FSDP2's hooks torch compiles no class of its own; call it in a module of yours" in " ".join(told)
