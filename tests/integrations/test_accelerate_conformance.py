"""The conformance suite on a user's own loop with Accelerate: compiled by `prepare`, and with a `hotloop.Loop` around it."""

import contextlib

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration
from conformance import Conformance
from fitting import Fitted
from python_in_steps import weighed
from safetensors.torch import load_file
from torch.nn import functional as F

import hotloop
from hotloop.integrations.accelerate import prepare

RAISED = "raised with cause and remedy: nobody owns the step, where no hotloop.Loop is around it"


def fit_with_accelerate(task, hot):
    """A training loop as in Accelerate's guide."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=task.device == "cpu", gradient_accumulation_steps=task.accumulate,
        project_config=ProjectConfiguration(str(task.save or ".")),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=0.0625, fused=True)
    model, optimizer, prepared_step, left = hot(task, accelerator, optimizer)
    begun = 0
    if task.resume is not None:
        accelerator.load_state(str(task.resume))
        begun = 1

    python = task.python

    def step(ids, labels, update=True):
        loss = weighed(F.cross_entropy(model(ids), labels), python)
        accelerator.backward(loss)
        if update:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    train_step = prepared_step(step)
    losses = []
    for _ in range(begun, task.epochs):
        model.train()
        for number, (ids, labels) in enumerate(task.batches, 1):
            task.begin()
            # `accumulate` counts in ``accelerator.step``, which a captured step may not read.
            with accelerator.accumulate(model) if task.accumulate > 1 else contextlib.nullcontext():
                more = {"update": number % task.accumulate == 0} if task.accumulate > 1 else {}
                losses.append(float(train_step(ids, labels, **more).detach()))
        model.eval()
        assert not task.model.training, "eval() reaches the model that was prepared"
        with torch.no_grad():
            for ids, _ in task.validation:
                model(ids)
    if task.save is not None:
        accelerator.save_state(str(task.save))
        state = accelerator.get_state_dict(model)
        assert set(state) == set(task.model.state_dict())
    return Fitted(model=task.model, losses=losses, optimizer=optimizer.state_dict(), **left())


class WithAccelerate(Conformance):
    def fit(self, task):
        return fit_with_accelerate(task, self.hot)

    def saved(self, path):
        return load_file(path / "model.safetensors")

    def remove(self, task):
        hotloop.uncompile(task.model)
        vars(task.model).pop("_is_accelerate_prepared", None)  # Accelerate's own mark, in an eager run as well


class TestPrepare(WithAccelerate):
    limits = {"test_failing_run_of_a_forward": RAISED, "test_failing_run_of_a_backward": RAISED}

    def hot(self, task, accelerator, optimizer):
        if task.run is None:
            return *accelerator.prepare(task.model, optimizer), lambda step: step, dict
        found = prepare(accelerator, task.model, optimizer, preset=task.run)
        left = lambda: {"status": hotloop.status(task.model), "remove": lambda: self.remove(task)}  # noqa: E731
        return *found, lambda step: step, left

    test_captured_step = None


class TestLoopAroundAccelerate(WithAccelerate):
    def hot(self, task, accelerator, optimizer):
        if task.run is None:
            return *accelerator.prepare(task.model, optimizer), lambda step: step, dict
        model, optimizer = prepare(accelerator, task.model, optimizer, preset="none")
        loop = hotloop.Loop(model, optimizer, run=task.run)

        def left():
            return {"status": loop.status(), "record": loop.record, "remove": lambda: (loop.close(), self.remove(task))}

        return model, optimizer, loop.step, left
