"""A program under the harness: its training step, its calls without gradients, and what both give."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop.measure import flatten, unflatten
from hotloop.step.loop.arguments import device_of
from hotloop.step.prove.proof import plain_run, values_of
from hotloop.step.prove.step_outputs import Made, kept
from hotloop.step.prove.wide_reference import Draw, NotRepeatableError, candidates, noting_draws, wide_step
from hotloop.step.state.program import Program
from hotloop.step.workload import Workload, arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

    Values = Mapping[str, torch.Tensor | None]

_log = logging.getLogger("hotloop")
KEPT_CALLS = 4
"""Calls of each model that are kept, to be repeated without gradients: different inputs, so that old outputs show."""


@dataclasses.dataclass(frozen=True, eq=False)
class Noted:
    """A call of one model, as its training step made it."""

    model: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Calls = dict[str, collections.deque[Noted]]
"""The newest calls of each model."""


class Subject:
    """One program: the workload, its models by name, and what was noted of its calls."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.models, self.holdings = workload, workload.models(), workload.holdings()
        self.device = device_of(self.holdings)

    def step(self, batch: Any) -> Any:
        """Run the training step."""
        return self.workload.run(batch)

    def follow(self, other: Subject) -> None:
        """Take over the state that another program of the same making is in: tensors and gradients, in place.

        Of what its optimizers were told, too: a schedule of its own has moved the rate of the other one alone.
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
                    if isinstance(value, torch.Tensor):  # a rate that a capture can read
                        group[key].copy_(value)

    def made(self, batch: Any, wide: Values | None = None) -> Made:
        """Run the training step; gives everything that it made, copied, with the same in more bits."""
        start = {name: one.clone() for name, one in self.holdings.tensors().items() if name.startswith("parameter ")}
        result, at_step = plain_run(self.holdings, lambda: self.step(batch))
        values = values_of(self.holdings, result, at_step)
        return Made(start, {name: None if one is None else one.clone() for name, one in values.items()}, wide)

    def in_more_bits(self, step: Callable[..., Any], compute_dtype: str, *call: Any) -> Values | None:
        """Run something in the widest dtype that it runs in, and undo it; None where it does in none.

        Gives what it made by the names of a proof.
        """
        program = Program(step, self.holdings, self.device, lambda: False)
        draws: list[Draw] = []

        def noted() -> Any:
            with noting_draws(draws):
                return plain_run(self.holdings, lambda: step(*call))

        kept(program, noted)
        for dtype in candidates(compute_dtype):
            try:
                return wide_step(program, (call, {}), dtype, draws)
            except NotRepeatableError as error:
                _log.info("harness: it is not run in more bits: %s", error)
        return None

    def infer(self, batch: Any, calls: Calls, number: int) -> Iterator[Any]:
        """Call without gradients: the program's own function, or one model after another as the training step did.

        Args:
            batch: for the program's own function.
            calls: of the training step.
            number: of this call; those after one another take different inputs where there are.

        Yields:
            each call's output; nothing of it is held here.
        """
        if self.workload.infer is not None:
            with torch.no_grad():
                output = self.workload.infer(*arguments(batch))
            yield output
            return
        output = None
        for name, noted in calls.items():
            one = noted[number % len(noted)]
            with torch.no_grad(), evaluating(self.models[name]):
                output = self.models[name](*one.args, **one.kwargs)
            yield output
            del output


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a model evaluate while the block runs, and each part back in its own mode afterwards."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextlib.contextmanager
def noting_calls(models: dict[str, nn.Module], calls: Calls) -> Iterator[None]:
    """Note the calls of eager models while the block runs, the newest `KEPT_CALLS` of each; tensors are copied."""
    handles = []

    def note(name: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                calls.setdefault(name, collections.deque(maxlen=KEPT_CALLS)).append(
                    Noted(name, *_copies((args, kwargs)))
                )

        return hook

    for name, model in models.items():
        handles.append(model.register_forward_pre_hook(note(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _copies(value: Any) -> Any:
    leaves, structure = flatten(value)
    return unflatten(structure, [one.detach().clone() if isinstance(one, torch.Tensor) else one for one in leaves])
