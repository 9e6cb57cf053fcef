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


USES = [Needs, Sharp, hooked, partial, wrapped]


@pytest.mark.parametrize("optimizer", USES, ids=lambda one: one.__name__)
def test_a_step_that_uses_its_closure_stays_the_trainers_and_trains_as_without_hotloop(optimizer):
    hot = HotLoop(run="eager")
    torch.testing.assert_close(trained(optimizer, hot), trained(optimizer), rtol=0, atol=0)
    (why,) = hot.status().why
    assert not hot.status().owned
    assert "closure" in why
    assert why in str(hot.status())


def test_the_step_of_an_optimizer_of_torchs_is_owned():
    hot = HotLoop(run="eager")
    torch.testing.assert_close(trained(torch.optim.SGD, hot), trained(torch.optim.SGD), rtol=0, atol=0)
    assert hot.status().owned, hot.status()


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
