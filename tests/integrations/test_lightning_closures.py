"""The Trainer hands its optimizer a closure: a step that does more than run it first stays the Trainer's."""

import functools

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from hotloop.integrations.lightning import HotLoop
from hotloop.integrations.lightning.ownership import closure_obstacle

pytestmark = pytest.mark.filterwarnings("default")  # the framework warns of its own use of torch


class Needs(torch.optim.AdamW):
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Sharp(torch.optim.SGD):
    """SAM: climbs, asks for the gradients there, returns, steps; without a closure it is plain SGD."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            return super().step()
        with torch.enable_grad():
            loss = closure()
        moved = [(one, one.grad * 0.5) for group in self.param_groups for one in group["params"]]
        for one, by in moved:
            one.add_(by)
        with torch.enable_grad():
            closure()
        for one, by in moved:
            one.sub_(by)
        super().step()
        return loss


class MovesFirst(torch.optim.SGD):
    """Asks for the gradients elsewhere, by one run of its closure."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                one.data.mul_(0.9)
        loss = None
        if closure is not None:
            loss = closure()
        super().step()
        return loss


class ByLoss(torch.optim.SGD):
    """Polyak's step size: the loss that the closure returns sets it."""

    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = closure()
        for group in self.param_groups:
            group["lr"] = 0.05 if loss is None else 0.05 * float(loss)
        super().step()
        return loss


class HandsOnLate(Sharp):
    def step(self, *args, **kwargs):
        return super().step(*args, **kwargs)


class Ordinary(torch.optim.SGD):
    """As published optimizers begin."""

    @torch.no_grad()
    def step(self, closure=None):
        """Step.

        Args:
            closure: runs the model.
        """
        if not self.param_groups:
            raise RuntimeError("no parameters")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class Lookahead(torch.optim.Optimizer):
    """Hands its closure on to the optimizer within."""

    inner = torch.optim.SGD

    def __init__(self, parameters, lr):
        self.optimizer = self.inner(parameters, lr=lr)
        super().__init__(self.optimizer.param_groups, {"lr": lr})

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            for one in group["params"]:
                one.data.mul_(0.99)
        return loss


class AroundSharp(Lookahead):
    inner = Sharp


class FromTheLastStep(torch.optim.SGD):
    """Uses the gradients that stand before its closure runs: those of the step before."""

    def step(self, closure=None):
        before = [one.grad for group in self.param_groups for one in group["params"]]
        loss = None
        if closure is not None:
            loss = closure()
        for one, last in zip(self.param_groups[0]["params"], before, strict=True):
            if last is not None:
                one.data.sub_(last, alpha=0.1)
        return loss


class ByProperty(torch.optim.SGD):
    def step(self, closure=None):
        norm = self.norm
        loss = None
        if closure is not None:
            loss = closure()
        self.last = norm
        super().step()
        return loss

    @property
    def norm(self):
        return [one.grad.norm() for one in self.param_groups[0]["params"] if one.grad is not None]


def hooked(parameters, lr):
    """A hook that the Trainer runs before the step's backward, so that it clips nothing."""
    optimizer = torch.optim.SGD(parameters, lr=lr)

    def clip(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e-3)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def partial(parameters, lr):
    optimizer = torch.optim.SGD(parameters, lr=lr)
    optimizer.step = functools.partial(optimizer.step)
    return optimizer


def wrapped(parameters, lr):
    """A decorator of the program's, which may call what it decorates in any way."""
    optimizer = torch.optim.SGD(parameters, lr=lr)
    own = optimizer.step

    @functools.wraps(own)
    def twice(closure=None):
        own(closure)
        return own(closure)

    optimizer.step = twice
    return optimizer


class Module(pl.LightningModule):
    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.optimizer, self.net = optimizer, nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.05)


def trained(optimizer, *callbacks):
    module, draws = Module(optimizer), torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(48, 8, generator=draws), torch.randn(48, 1, generator=draws))
    pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=list(callbacks), logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(data, batch_size=8))  # fmt: skip
    return torch.cat([one.detach().flatten() for one in module.parameters()])


USES = [Needs, Sharp, MovesFirst, ByLoss, HandsOnLate, AroundSharp, Lookahead, hooked, partial, wrapped]


@pytest.mark.parametrize("optimizer", USES, ids=lambda one: one.__name__)
def test_a_step_that_uses_its_closure_stays_the_trainers_and_trains_as_without_hotloop(optimizer):
    hot = HotLoop(run="eager")
    torch.testing.assert_close(trained(optimizer, hot), trained(optimizer), rtol=0, atol=0)
    (why,) = hot.status().why
    assert not hot.status().owned
    assert "closure" in why
    assert why in str(hot.status())


def test_a_step_that_runs_its_closure_first_is_owned():
    hot = HotLoop(run="eager")
    torch.testing.assert_close(trained(Ordinary, hot), trained(Ordinary), rtol=0, atol=0)
    assert hot.status().owned, hot.status()


@pytest.mark.parametrize("optimizer", [FromTheLastStep, ByProperty])
def test_a_step_that_reads_anything_before_its_closure_stays_the_trainers(optimizer):
    assert "may run its closure late" in closure_obstacle(optimizer([nn.Parameter(torch.zeros(2))], lr=0.1))


def test_a_hook_before_the_steps_of_all_optimizers_counts():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        assert "step pre-hook" in closure_obstacle(optimizer)
    finally:
        handle.remove()
    assert not closure_obstacle(optimizer)


def test_torchs_own_optimizers_run_their_closure_first_but_lbfgs():
    kinds = [one for one in vars(torch.optim).values() if isinstance(one, type)]
    kinds = [one for one in kinds if issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer]
    assert len(kinds) > 10
    more = []
    for kind in kinds:
        optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own in front
        if closure_obstacle(optimizer):
            more.append(kind.__name__)
    assert more == ["LBFGS"]
