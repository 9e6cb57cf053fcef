"""Captured steps whose parameters FSDP2 has sharded, in one process; tests/step/ranks has several."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import hotloop
from hotloop._torch.sharded import Sharded, is_spread, shard_of
from hotloop.step.state.holdings import Holdings, Views
from hotloop.step.state.snapshot import ForwardSyncs
from hotloop.testing import captured_step_emulation


@pytest.fixture(autouse=True)
def _alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Raised(Exception):
    """What a test raises in a forward."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.second(self.first(x).relu())


def made():
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.first)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def train(run, *, steps=20, every=1, returns=lambda loss, norm: loss, between=None, returned=None, ends=None):
    model, optimizer = made()
    loop = hotloop.Loop(model, optimizer, run=run, sentinel=0)

    @loop.step
    def step(x, update):
        loss, norm = model(x).square().mean(), None
        loss.backward()
        if update:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if ends is not None:
            ends(model)
        return returns(loss.detach(), norm)

    draws, found, ran = torch.Generator().manual_seed(1), [], []
    for number in range(steps):
        if between is not None:
            between(number, model)
        result = step(torch.randn(3, 4, generator=draws), number % every == every - 1)
        found.append(returned(result) if returned is not None else result)
        ran.append(loop.last_ran())
    left = torch.cat([shard_of(one).detach().flatten() for one in model.parameters()])
    status = loop.status()
    loop.close()
    return torch.stack(found), left, ran, " ".join(str(status).split())


def beside_eager(**how):
    eager = train("eager", **how)
    with captured_step_emulation():
        ours = train("eager+graph", **how)
    assert torch.equal(eager[0], ours[0])
    assert torch.equal(eager[1], ours[1])
    return ours


def test_a_sharded_step_is_replayed():
    _, _, ran, _ = beside_eager()
    assert ran[-10:] == [("eager+graph", "run")] * 10


def test_gradients_of_a_group_which_lie_in_one_memory_are_all_read_where_one_is():
    """The bias's are added to where the weight's are: a recording that knew of one alone would leave the other."""
    _, _, ran, _ = beside_eager(every=2, steps=40)
    assert ran[-10:] == [("eager+graph", "run")] * 10


def test_whole_parameters_that_an_evaluation_left_are_not_taken_for_the_new_ones():
    found = []

    def between(number, model):
        if number % 4 == 1:
            with torch.no_grad():
                found.append(model(torch.ones(1, 4)))

    _, _, ran, _ = beside_eager(between=between)
    assert ran[-10:] == [("eager+graph", "run")] * 10
    half = len(found) // 2
    assert half > 2
    assert torch.equal(torch.cat(found[:half]), torch.cat(found[half:]))


def test_a_loop_that_is_made_after_an_evaluation_knows_the_shards():
    def evaluated():
        model, optimizer = made()
        with torch.no_grad():
            model(torch.ones(1, 4))
        return model, optimizer

    model, optimizer = evaluated()
    assert not any(map(is_spread, model.second.parameters()))
    with captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph")
    assert all(map(is_spread, model.second.parameters()))
    loop.close()


def test_a_result_that_is_spread_over_processes_is_declined_with_its_remedy():
    _, _, ran, status = beside_eager(returns=lambda _loss, norm: norm, returned=lambda norm: norm.full_tensor())
    assert ran[-1] == ("eager", "run")
    assert "returns a tensor that is spread over processes (a DTensor)" in status
    assert "tensor.full_tensor()" in status


def test_the_remedy_of_such_a_result_is_captured():
    _, _, ran, _ = beside_eager(returns=lambda _loss, norm: norm.full_tensor())
    assert ran[-1] == ("eager+graph", "run")


def test_a_forward_that_ended_half_way_is_forgotten():
    model, optimizer = made()
    sharded = Sharded([model])

    def raises(*_):
        raise Raised

    hook = model.second.register_forward_pre_hook(raises)
    with pytest.raises(Raised):
        model(torch.randn(3, 4))
    hook.remove()
    sharded.rest()
    expected, _ = made()
    batch = torch.randn(3, 4)
    for one in (model, expected):
        one(batch).square().mean().backward()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(shard_of(one.grad), shard_of(other.grad))
    optimizer.zero_grad()


def test_another_shard_under_a_parameter_is_seen():
    model, _ = made()
    parameter = next(model.parameters())
    views = Views([parameter])
    assert views.same()
    parameter._local_tensor = parameter._local_tensor.clone()
    assert not views.same()
    assert len(views.moved()) == 1


def unsynced(model):
    model.set_requires_gradient_sync(False)


def test_an_undone_step_has_changed_no_setting():
    model, optimizer = made()
    syncs = ForwardSyncs(Holdings({"model": model}, {"optimizer": optimizer}))
    unsynced(model)
    syncs.restore()
    assert [one["reduce_grads"] for one in Sharded([model]).switches()] == [True] * 2


def test_what_keeps_whole_gradients_or_parameters_is_named():
    model, _ = made()
    sharded = Sharded([model])
    unsynced(model)
    assert not sharded.why_not_recorded()
    model(torch.randn(3, 4)).square().mean().backward()
    assert "set_requires_gradient_sync(False)" in sharded.why_not_recorded()
    model, _ = made()
    sharded = Sharded([model])
    model.set_reshard_after_backward(False)
    assert "set_reshard_after_backward(False)" in sharded.why_not_recorded()


def test_parameters_that_a_program_keeps_whole_stay_so():
    """After the optimizer's step eager computes with what it has gathered before."""

    def between(number, model):
        model.set_reshard_after_backward(number < 12)

    _, _, ran, status = beside_eager(between=between)
    assert ran[-1] == ("eager", "run")
    assert "set_reshard_after_backward(False)" in " ".join(status.replace("│", " ").split())
