"""The conformance suite itself, on the plainest integrations: a user's own loop, and compile in place."""

import torch
from conformance import Conformance
from fitting import Fitted
from python_in_steps import weighed
from torch.nn import functional as F

import hotloop


def fit_plainly(task, hot):
    """A user's training loop; ``hot(model, optimizer, step)`` returns the step that runs, and the integration."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.0625, fused=True)
    done = 0
    if task.resume is not None:
        state = torch.load(task.resume, weights_only=True)
        task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["epochs"]

    python = task.python

    def step(ids, labels, update=True):
        loss = weighed(F.cross_entropy(task.model(ids), labels), python)
        (loss / task.accumulate).backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    train_step, left = hot(task, optimizer, step)
    losses = []
    for _ in range(done, task.epochs):
        task.model.train()
        for number, (ids, labels) in enumerate(task.batches, 1):
            task.begin()
            more = {"update": number % task.accumulate == 0} if task.accumulate > 1 else {}
            losses.append(float(train_step(ids, labels, **more).detach()))
        task.model.eval()
        with torch.no_grad():
            for ids, _ in task.validation:
                task.model(ids)
    if task.save is not None:
        state = {"model": task.model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": task.epochs}
        torch.save(state, task.save)
    return Fitted(model=task.model, losses=losses, optimizer=optimizer.state_dict(), **left())


class Plain(Conformance):
    def saved(self, path):
        return torch.load(path, weights_only=True)["model"]


class TestLoop(Plain):
    def fit(self, task):
        return fit_plainly(task, self.hot)

    def hot(self, task, optimizer, step):
        if task.run is None:
            return step, dict
        loop = hotloop.Loop(task.model, optimizer, run=task.run)
        return loop.step(step), lambda: {"status": loop.status(), "record": loop.record, "remove": loop.close}


class TestCompile(Plain):
    limits = {
        "test_failing_run_of_a_forward": "raised with cause and remedy: nobody owns the step",
        "test_failing_run_of_a_backward": "raised with cause and remedy: nobody owns the step",
    }

    def fit(self, task):
        return fit_plainly(task, self.hot)

    def hot(self, task, optimizer, step):
        if task.run is None:
            return step, dict
        hotloop.compile(task.model, task.run)
        return step, lambda: {
            "status": hotloop.status(task.model), "remove": lambda: hotloop.uncompile(task.model),
        }  # fmt: skip

    test_captured_step = None
