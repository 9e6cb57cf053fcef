"""Fabric passes the conformance suite: with a loop around its step, and with the model compiled in place."""

import lightning
import torch
from conformance import Conformance
from fitting import Fitted
from python_in_steps import weighed
from torch.nn import functional as F

import hotloop
from hotloop.integrations.fabric import loop as fabric_loop


def fit_with_fabric(task, hot, precision="32-true"):
    """A Fabric program as its users write it; ``hot(fabric, model, optimizer, task)`` is called once it is set up."""
    fabric = lightning.Fabric(accelerator=task.device, devices=1, precision=precision)
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.0625, fused=True)
    model, optimizer = fabric.setup(task.model, optimizer)
    state = {"model": model, "optimizer": optimizer, "epochs": 0}
    if task.resume is not None:
        fabric.load(task.resume, state)

    python = task.python

    def step(ids, labels, update=True):
        loss = weighed(F.cross_entropy(model(ids), labels), python)
        fabric.backward(loss / task.accumulate)
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    decorate, left = hot(fabric, model, optimizer, task)
    train_step = decorate(step)
    losses = []
    for _ in range(state["epochs"], task.epochs):
        model.train()
        for number, (ids, labels) in enumerate(task.batches, 1):
            task.begin()
            more = {"update": number % task.accumulate == 0} if task.accumulate > 1 else {}
            losses.append(float(train_step(ids, labels, **more).detach()))
        model.eval()
        with torch.no_grad():
            for ids, _ in task.validation:
                model(ids)
    if task.save is not None:
        fabric.save(task.save, {**state, "epochs": task.epochs})
    return Fitted(model=task.model, losses=losses, optimizer=optimizer.state_dict(), **left())


def eager(*_):
    return lambda step: step, dict


class OfFabric(Conformance):
    def saved(self, path):
        return torch.load(path, weights_only=True)["model"]


class TestLoop(OfFabric):
    def fit(self, task):
        return fit_with_fabric(task, eager if task.run is None else self.hot)

    def hot(self, fabric, model, optimizer, task):
        loop = fabric_loop(fabric, model, optimizer, run=task.run)
        return loop.step, lambda: {"status": loop.status(), "record": loop.record, "remove": loop.close}


class TestCompile(OfFabric):
    """Fabric with the model compiled in place; the user runs the step."""

    limits = {
        "test_failing_run_of_a_forward": "raised with cause and remedy: nobody owns the step; `fabric.loop` does",
        "test_failing_run_of_a_backward": "raised with cause and remedy: nobody owns the step; `fabric.loop` does",
    }
    test_captured_step = None

    def fit(self, task):
        return fit_with_fabric(task, eager if task.run is None else self.hot)

    def hot(self, fabric, model, optimizer, task):
        hotloop.compile(model, task.run)
        return lambda step: step, lambda: {
            "status": hotloop.status(model), "remove": lambda: hotloop.uncompile(model),
        }  # fmt: skip
