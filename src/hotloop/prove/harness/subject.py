"""A program under the harness: its training step, its calls without gradients, and the values that both give."""

from __future__ import annotations

import collections
import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop.measure import flatten, unflatten
from hotloop.step.loop.arguments import device_of
from hotloop.step.prove.proof import plain_run, values_of
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.step.state.program import Call
from hotloop.step.workload import Workload, arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


KEPT_CALLS = 4
"""Calls of each model that are kept, to be repeated without gradients. Different inputs make old outputs visible."""
Calls = dict[str, collections.deque[Call]]
"""The newest calls of each model, with copies of their tensors."""


class Subject:
    """A program made for the harness: its workload, its models by name, and everything that its step changes."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.models, self.holdings = workload, workload.models(), workload.holdings()
        self.device = device_of(self.holdings)

    def step(self, batch: Any) -> Any:
        """Run the training step."""
        return self.workload.run(batch)

    def follow(self, other: Subject) -> None:
        """Copy the state of another program of the same making: tensors and gradients in place, optimizer settings.

        Only one of two programs runs its batches' schedule, which moves the learning rate of that one alone.
        """
        theirs = other.holdings.tensors()
        gradients = other.holdings.gradients()
        with torch.no_grad():
            for name, mine in self.holdings.tensors().items():
                if name in theirs:
                    mine.copy_(theirs[name])
            for name, own in self.holdings.gradients().items():
                gradient = gradients.get(name)
                if own is not None and gradient is not None:
                    own.copy_(gradient)
        for name, optimizer in self.holdings.optimizers.items():
            for group, others in zip(optimizer.param_groups, other.holdings.optimizers[name].param_groups, strict=True):
                group.update({key: value for key, value in others.items() if isinstance(value, int | float | tuple)})
                for key, value in others.items():
                    if isinstance(value, torch.Tensor):  # a learning rate that a capture can read
                        group[key].copy_(value)

    def made(self, batch: Any) -> StepOutputs:
        """Run the training step; return copies of everything that it made."""
        parameters = {name: one for name, one in self.holdings.tensors().items() if name.startswith("parameter ")}
        start = {name: parameter.clone() for name, parameter in parameters.items()}
        result, at_step = plain_run(self.holdings, lambda: self.step(batch))
        values = values_of(self.holdings, result, at_step)
        copies = {name: None if value is None else value.clone() for name, value in values.items()}
        return StepOutputs(start, copies, None)

    def infer(self, batch: Any, calls: Calls, number: int) -> Iterator[Any]:
        """Call without gradients: the program's own function, or each model as the training step called it.

        Args:
            batch: for the program's own function.
            calls: of the training step.
            number: of this call; consecutive calls take different inputs if there are several.

        Yields:
            each call's output; nothing here keeps a reference to it.
        """
        if self.workload.infer is not None:
            with torch.no_grad():
                output = self.workload.infer(*arguments(batch))
            yield output
            return
        output = None
        for name, noted in calls.items():
            args, kwargs = noted[number % len(noted)]
            model = self.models[name]
            modes = [(part, part.training) for part in model.modules()]
            try:
                with torch.no_grad():
                    output = model.eval()(*args, **kwargs)
            finally:
                for part, training in modes:  # each part had a mode of its own
                    part.training = training
            yield output
            del output


@contextlib.contextmanager
def noting_calls(models: dict[str, nn.Module], calls: Calls) -> Iterator[None]:
    """Note the newest `KEPT_CALLS` calls of each eager model in the block, with copies of their tensors."""
    handles = []

    def note(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not torch.is_grad_enabled():
                return
            leaves, structure = flatten((args, kwargs))
            copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            calls.setdefault(name, collections.deque(maxlen=KEPT_CALLS)).append(unflatten(structure, copies))

        return hook

    for name, model in models.items():
        handles.append(model.register_forward_pre_hook(note(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
