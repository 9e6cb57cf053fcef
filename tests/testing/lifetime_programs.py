"""Programs that hold, pass on and read outputs of CUDA graphs; `lifetime_cases` says which of them are right.

Each is a function of a `World`, which compiles its modules, and gives the numbers that it read. Eager's are the right
ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing

import torch
from torch import nn

import hotloop


class Net(nn.Module):
    """One layer whose output saves something for its backward."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.layer(x))


class Cell(Net):
    """A recurrent cell: takes an input and a hidden state, returns the next hidden state."""

    def forward(self, x, hidden):
        return torch.tanh(self.layer(x) + hidden)


class Writes(Net):
    """A module that writes into its input, which CUDA graphs do not capture."""

    def forward(self, x):
        x.add_(1)
        return torch.tanh(self.layer(x))


class HandsOn(Net):
    """A module that returns its input and its parameter beside its output."""

    def forward(self, x):
        return torch.tanh(self.layer(x)), x, self.layer.weight


@dataclasses.dataclass
class World:
    """How a case compiles its modules (``compile``), where, and after how many clean steps of each (``warm``)."""

    compile: typing.Callable
    device: str = "cpu"
    warm: int = 0

    def net(self, seed=0, kind=Net):
        module = self.compile(kind(seed).to(self.device))
        for _ in range(self.warm):
            self._clean(module, kind)
        return module

    @torch.enable_grad()
    def _clean(self, module, kind):
        """Run a training step and an inference call after which nothing is held."""
        given = (self.x(90), self.x(91)) if kind is Cell else (self.x(90),)
        with torch.no_grad():
            module(*given)
        made = module(*given)
        (made[0] if isinstance(made, tuple) else made).sum().backward()
        del made
        module.zero_grad()

    def x(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 8, generator=generator).to(self.device)


def read(*tensors):
    return [float(one.detach().double().sum()) for one in tensors]


def gradients(module):
    return read(*(parameter.grad for parameter in module.parameters()))


@torch.no_grad()
def held_output(world):
    net = world.net()
    first = net(world.x(0))
    net(world.x(1))
    return read(first)


@torch.no_grad()
def two_inference_calls(world):
    net = world.net()
    return read(net(world.x(0)) - net(world.x(1)))


@torch.no_grad()
def held_view(world):
    net = world.net()
    row = net(world.x(0))[1]
    net(world.x(1))
    return read(row)


def detached_output(world):
    net = world.net()
    kept = []
    for step in range(3):
        out = net(world.x(step))
        kept.append(out.detach())
        out.sum().backward()
        net.zero_grad()
    return read(*kept)


def list_of_losses(world):
    net = world.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = net(world.x(step))
        losses.append(loss)
        loss.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return read(*losses)


def numbers_of_losses(world):
    net = world.net()
    losses = []
    for step in range(3):
        loss = net(world.x(step)).square().mean()
        losses.append(loss.item())
        loss.backward()
        net.zero_grad()
    return losses


@torch.no_grad()
def cloned_output(world):
    net = world.net()
    first = net(world.x(0)).clone()
    net(world.x(1))
    return read(first)


@torch.no_grad()
def owned_output(world):
    net = world.net()
    outs = [hotloop.own({"out": net(world.x(step)), "step": step})["out"] for step in range(3)]
    return read(*outs)


def owned_training_output(world):
    net = world.net()
    kept = []
    for step in range(3):
        out = hotloop.own(net(world.x(step)))
        out.sum().backward()
        net.zero_grad()
        kept.append(out)
    return read(*kept)


def owned_gradients(world):
    net = world.net()
    sums = [torch.zeros_like(parameter) for parameter in net.parameters()]
    kept = []
    for step in range(3):
        net(world.x(step)).sum().backward()
        kept.append(hotloop.own([parameter.grad for parameter in net.parameters()]))
        net.zero_grad()
    for old in kept:
        torch._foreach_add_(sums, old)
    return read(*sums)


def accumulation(world):
    net = world.net()
    for step in range(3):
        net(world.x(step)).sum().backward()
    return gradients(net)


def accumulation_into_zeros(world):
    net = world.net()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for step in range(3):
        net(world.x(step)).sum().backward()
    return gradients(net)


def old_gradients(world):
    net = world.net()
    net(world.x(0)).sum().backward()
    old = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    net(world.x(1)).sum().backward()
    return read(*old)


def old_gradients_cloned(world):
    net = world.net()
    net(world.x(0)).sum().backward()
    old = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    net(world.x(1)).sum().backward()
    return read(*old)


def gradients_by_grad(world):
    net = world.net()
    first = torch.autograd.grad(net(world.x(0)).sum(), list(net.parameters()))
    second = torch.autograd.grad(net(world.x(1)).sum(), list(net.parameters()))
    return read(*first, *second)


def gradient_of_an_input(world):
    net = world.net()
    x = world.x(0).requires_grad_()
    net(x).sum().backward()
    net(world.x(1)).sum().backward()
    return read(x.grad)


def mark_between_two_forwards(world):
    net = world.net()
    first = net(world.x(0))
    torch.compiler.cudagraph_mark_step_begin()
    second = net(world.x(1))
    (first.sum() + second.sum()).backward()
    return gradients(net)


def two_forwards_one_backward(world):
    net = world.net()
    (net(world.x(0)).sum() * net(world.x(1)).sum()).backward()
    return gradients(net)


def two_forwards_two_backwards(world):
    net = world.net()
    first, second = net(world.x(0)), net(world.x(1))
    first.sum().backward()
    second.square().sum().backward()
    return gradients(net)


def forward_between_two_backwards(world):
    net = world.net()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    first, second = net(world.x(0)), net(world.x(1))
    first.sum().backward()
    third = net(world.x(2))
    second.square().sum().backward()
    third.sum().backward()
    return gradients(net)


def average_that_begins_as_an_output(world):
    net = world.net()
    average = None
    with torch.no_grad():
        for step in range(3):
            out = net(world.x(step))
            average = out if average is None else 0.9 * average + 0.1 * out
    return read(average)


def average_that_begins_as_zeros(world):
    net = world.net()
    average = torch.zeros(4, 8, device=world.device)
    with torch.no_grad():
        for step in range(3):
            average = 0.9 * average + 0.1 * net(world.x(step))
    return read(average)


@torch.no_grad()
def output_passed_to_a_later_call(world):
    one, two = world.net(0), world.net(1)
    return read(two(one(world.x(0))))


@torch.no_grad()
def output_owned_and_passed_on(world):
    one, two = world.net(0), world.net(1)
    return read(two(hotloop.own(one(world.x(0)))))


def chain_in_training(world):
    one, two = world.net(0), world.net(1)
    for step in range(3):
        one.zero_grad()
        two.zero_grad()
        two(one(world.x(step))).sum().backward()
    return gradients(one) + gradients(two)


@torch.no_grad()
def modules_share_a_pool(world):
    one, two = world.net(0), world.net(1)
    first = one(world.x(0))
    two(world.x(1))
    return read(first)


@torch.no_grad()
def greedy_by_numbers(world):
    net = world.net()
    scores = [net(world.x(step)).sum().item() for step in range(5)]
    return [max(scores)]


@torch.no_grad()
def greedy_that_keeps_the_best(world):
    net = world.net()
    best, most = None, -float("inf")
    for step in range(5):
        out = net(world.x(step))  # the last is not the best
        if out.sum().item() > most:
            best, most = out, out.sum().item()
    return read(best)


@torch.no_grad()
def hidden_state_across_calls(world):
    cell = world.net(kind=Cell)
    hidden = world.x(7)
    for step in range(4):
        hidden = cell(world.x(step), hidden)
    return read(hidden)


@torch.no_grad()
def hidden_state_cloned(world):
    cell = world.net(kind=Cell)
    hidden = world.x(7)
    for step in range(4):
        hidden = cell(world.x(step), hidden).clone()
    return read(hidden)


def hidden_state_in_training(world):
    cell = world.net(kind=Cell)
    hidden = world.x(7)
    for step in range(4):
        hidden = cell(world.x(step), hidden)
    hidden.sum().backward()
    return gradients(cell)


def backward_twice(world):
    net = world.net()
    loss = net(world.x(0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(net)


def exception_before_backward(world):
    net = world.net()
    with contextlib.suppress(ValueError):
        lost = net(world.x(0))
        raise ValueError(lost.shape)
    del lost
    net(world.x(1)).sum().backward()
    return gradients(net)


def evaluation_before_backward(world):
    net = world.net()
    out = net(world.x(0))
    with torch.no_grad():
        seen = net(world.x(1)).sum().item()
    out.sum().backward()
    return [seen, *gradients(net)]


def plain_training(world):
    net = world.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for step in range(4):
        net(world.x(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return read(*net.parameters())


def gradients_dropped_late(world):
    net = world.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(4):
        loss = net(world.x(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return read(*net.parameters())


@torch.no_grad()
def what_was_given(world):
    net = world.net(kind=HandsOn)
    _, given, weight = net(world.x(0))
    net(world.x(1))
    return read(given, weight)


@torch.no_grad()
def capture_is_skipped(world):
    net = world.net(kind=Writes)
    first = net(world.x(0))
    net(world.x(1))
    return read(first)


@torch.no_grad()
def memory_is_used_again(world):
    net = world.net()
    for step in range(6):
        net(world.x(step))
        fresh = [world.x(step + one) for one in range(8)]
        net(fresh[0])
        read(*fresh)
    return read(*fresh)
