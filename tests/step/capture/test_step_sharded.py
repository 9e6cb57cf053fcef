"""Captured steps whose parameters FSDP2 has sharded, in one process; tests/step/ranks has several."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import hotloop
from hotloop._torch.sharded import Sharded, is_spread, shard_of
from hotloop.step.state.holdings import Holdings, Views
from hotloop.step.state.snapshot import ForwardSyncs
from hotloop.testing import captured_step_emulation
from hotloop.testing.captured import Tape


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
    loop = hotloop.Loop(model, optimizer, run=run)

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


def test_what_a_program_begins_to_gather_before_a_call_is_gathered_again():
    _, _, ran, _ = beside_eager(between=lambda _number, model: model.unshard(async_op=True))
    assert ran[-10:] == [("eager+graph", "run")] * 10


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


def test_an_argument_that_is_spread_over_processes_is_declined():
    model, optimizer = made()
    mesh = init_device_mesh("cpu", (1,))
    with captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph")

        @loop.step
        def step(x):
            loss = model(x.to_local()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(6):
            step(distribute_tensor(torch.randn(3, 4), mesh, [Shard(0)]))
    assert "argument x is spread over processes" in " ".join(str(loop.status()).split())
    assert loop.last_ran() == ("eager", "run")
    loop.close()


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


def test_a_backward_that_ended_half_way_leaves_no_gradients():
    model, _ = made()
    sharded = Sharded([model])

    def raises(_):
        raise Raised

    model.second.register_forward_pre_hook(lambda _, given: given[0].register_hook(raises) and None)
    with pytest.raises(Raised):
        model(torch.randn(3, 4)).square().mean().backward()
    whole = model.second.weight
    assert whole.grad is not None
    sharded.rest()
    assert whole.grad is None
    assert all(type(one).__name__ == "DTensor" for one in model.parameters())


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


def synced(_number, model):
    model.set_requires_gradient_sync(True)


def test_a_step_that_leaves_a_setting_as_it_found_it_is_replayed():
    """Fabric's no_backward_sync(enabled=False) around the last backward of a step leaves it off, for each next one."""

    def trained(run):
        model, optimizer = made()
        model.register_forward_pre_hook(lambda *_: model.set_requires_gradient_sync(True))
        loop, draws, losses = hotloop.Loop(model, optimizer, run=run), torch.Generator().manual_seed(1), []

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            unsynced(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(20):
            losses.append(step(torch.randn(3, 4, generator=draws)))
            assert [one["reduce_grads"] for one in Sharded([model]).switches()] == [False] * 2
        ran = loop.last_ran()
        loop.close()
        return torch.stack(losses), ran

    eager, _ = trained("eager")
    with captured_step_emulation():
        ours, ran = trained("eager+graph")
    assert torch.equal(eager, ours)
    assert ran == ("eager+graph", "run")


def test_a_step_that_leaves_a_setting_otherwise_than_it_found_it_is_declined():
    _, _, ran, status = beside_eager(between=synced, ends=unsynced)
    assert ran[-1] == ("eager", "run")
    assert "the step leaves set_requires_gradient_sync(), or another of its settings, otherwise" in " ".join(
        status.replace("│", " ").split()
    )


def test_whole_gradients_that_are_reduced_outside_of_the_step_are_seen_before_it_is_run_twice():
    """No call finds any, as none of the recordings could, and each leaves some."""

    def trained(run):
        model, optimizer = made()
        loop, draws = hotloop.Loop(model, optimizer, run=run), torch.Generator().manual_seed(1)

        @loop.step
        def accumulate(x):
            model.set_requires_gradient_sync(False)
            model(x).square().mean().backward()
            model.set_requires_gradient_sync(True)

        for _ in range(12):
            accumulate(torch.randn(3, 4, generator=draws))
            model(torch.randn(3, 4, generator=draws)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        ran = loop.last_ran()
        loop.close()
        return [shard_of(one).detach().clone() for one in model.parameters()], ran

    eager, _ = trained("eager")
    with captured_step_emulation():
        ours, ran = trained("eager+graph")
    assert all(map(torch.equal, eager, ours))
    assert ran == ("eager", "run")


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


def test_a_capture_that_fails_between_two_backwards_leaves_no_whole_gradients(monkeypatch):
    """The first backward does not reduce: what it has kept would be added to eager's."""
    recorded, failed = Tape.record, []

    def record(self, operation, args, kwargs):
        if "cumsum" in str(operation) and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("planted")
        return recorded(self, operation, args, kwargs)

    def trained(run):
        model, optimizer = made()
        loop, draws = hotloop.Loop(model, optimizer, run=run), torch.Generator().manual_seed(1)

        @loop.step
        def step(x):
            unsynced(model)
            model(x).square().mean().backward()
            model.set_requires_gradient_sync(True)
            loss = model(x.cumsum(0)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = [step(torch.randn(3, 4, generator=draws)) for _ in range(12)]
        loop.close()
        return torch.stack(losses)

    eager = trained("eager")
    monkeypatch.setattr(Tape, "record", record)
    with captured_step_emulation():
        assert torch.equal(eager, trained("eager+graph"))
    assert failed


def test_parameters_that_a_program_keeps_whole_stay_so():
    """After the optimizer's step eager computes with what it has gathered before."""

    def between(number, model):
        model.set_reshard_after_backward(number < 12)

    _, _, ran, status = beside_eager(between=between)
    assert ran[-1] == ("eager", "run")
    assert "set_reshard_after_backward(False)" in " ".join(status.replace("│", " ").split())
