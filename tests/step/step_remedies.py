"""Programs that are declined, and the same once they do what the remedy says: what their tables share."""

import torch
from step_programs import GRAPH
from torch import nn

STEPS = 10
OFTEN = 32
"""Steps after which it is seen that something is another one in each of them."""


def trained(run, loss_of, arguments, *, model=None, around=lambda result: None, steps=STEPS):
    """Train a model with a step around a loss; ``loss_of(model, *arguments)`` may return more than the loss."""
    model = model or nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

    @run.loop(model, optimizer).step
    def train_step(*given):
        made = loss_of(model, *given)
        loss = made[0] if isinstance(made, tuple) else made
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return made if not isinstance(made, tuple) else (loss, *made[1:])

    for number in range(steps):
        around(run.note(train_step(*arguments(number))))
    return model, optimizer


def rows(_number=0):
    return (torch.randn(5, 4),)


def check(cpu, program, reason, hint, *, asked=GRAPH, then=GRAPH):
    run = cpu.alike(lambda run: program(run, followed=False), asked=asked)
    told = run.declined[0]
    assert reason in told.reason, told
    assert hint in told.hint, told
    assert run.status().tier == "eager"
    run = cpu.alike(lambda run: program(run, followed=True), asked=then)
    assert not run.declined, run.declined
    assert run.status().tier == then
    assert then != GRAPH or sum(run._replays.values()) > 0
