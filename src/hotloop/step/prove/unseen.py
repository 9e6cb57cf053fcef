"""Gradients that were zero, or too small to judge, whenever compiled code was compared with eager.

While LoRA's B is zero, so is the gradient of A: for all of a proof where gradients are accumulated, or a warm-up begins
with a rate of 0. Zero convolutions and adaLN-zero are alike, and a part that thaws has had no gradient at all. In a
slow warm-up it is so small at first that it may be rounding, of which a proof judges the size alone. So proven code is
in force, and is proven again at the first gradient that is not zero, and at the first that is no longer small.

At first each step is looked at, later one in so many that the distance is a share of the steps since the proof. A look
is a few launches; the host reads it some steps later, once the device has got there, and waits for nothing. So the
step that is noticed has trained with its gradients, and so have those until it is read.
"""

from __future__ import annotations

import collections
import contextlib
import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.foreach import norms
from hotloop._torch.sharded import shard_of
from hotloop.step.prove.outcomes import parameter_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.state.program import WriteWatch

SHARE = 64
"""So many looks at first, and so many for each further e-fold of steps: a gradient is noticed late by 1/64 of them."""


class Unseen:
    """The parameters whose gradients no proof of some compiled code has seen.

    Args:
        parameters: them, by name.
        rest: steps before the first look.
        floors: by name, the root mean square up to which a gradient may be rounding, of those that were not zero.

    Attributes:
        found: a gradient was no longer zero, or no longer below its floor.
        seen: the names of those that proofs of this code have seen.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], rest: int = 0, floors: Mapping[str, float] | None = None
    ) -> None:
        self.parameters, self.rest, self.floors, self.found = dict(parameters), rest, dict(floors or {}), False
        self.seen: frozenset[str] = frozenset()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._steps, self._next = 0, 1 + rest
        self._passed: list[torch.Tensor] = []
        self._any: torch.Tensor | None = None
        """Whether a gradient of the last look was past its floor, on its way to the host."""
        self._failed: Exception | None = None
        """What went wrong amid the user's step, where nobody may see it."""
        self._arrived: torch.cuda.Event | None = None

    @classmethod
    def after(
        cls, outcomes: Iterable[Outcome], parameters: Mapping[str, torch.nn.Parameter], before: Unseen | None
    ) -> Unseen:
        """Return what the steps of a proof have not seen.

        A gradient that comes once in a hundred steps (a seldom expert's) may be missed by the proof that it leads to.
        The next looks come later each time, so that such proofs stay a small share of a run.

        Args:
            outcomes: of the proof's steps.
            parameters: all parameters, by name.
            before: what the proofs of the same code so far had not seen: where heads or experts take turns, each proof
                sees others.
        """
        found = [one for outcome in outcomes for one in _not_zero(outcome)]
        seen = frozenset(name for name, floor in found if floor is None)
        seen |= before.seen if before is not None else frozenset()
        left = {name: parameter for name, parameter in parameters.items() if name not in seen}
        known = before.floors if before is not None else {}
        floors = {**known, **{name: floor for name, floor in found if floor is not None}}
        rest = 0
        learnt = floors.keys() != known.keys()
        if before is not None and before.found and before.parameters.keys() == left.keys() and not learnt:
            rest = max(SHARE, 2 * before.rest)
        made = cls(left, rest, floors)
        made.seen = seen
        return made

    def due(self) -> bool:
        """Count a step; return whether to look at its gradients."""
        self._steps += 1
        if not self.parameters or self._steps < self._next or self._any is not None:
            return False
        self._next = self._steps + max(1, self._steps // SHARE)
        return True

    @contextlib.contextmanager
    def looking(self, writes: WriteWatch) -> Iterator[None]:
        """Look at what optimizers read in the block; where that fails, `appeared` raises after the step."""

        def look(optimizer: torch.optim.Optimizer) -> None:
            try:
                self.look_before(optimizer)
            except Exception as error:  # noqa: BLE001 - amid the user's call
                self._failed = error

        writes.tell = look
        try:
            yield
        finally:
            writes.tell = None

    def look_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that an optimizer is about to read."""
        parameters = (one for group in optimizer.param_groups for one in group["params"])
        self._look([(self._names[id(one)], one.grad) for one in self._asked(parameters) if id(one) in self._names])

    def look_after(self, at_step: Mapping[str, torch.Tensor]) -> None:
        """Look at the gradients that a step has left, and at those that its optimizers have read in a replay."""
        left = [(self._names[id(one)], one.grad) for one in self._asked(self.parameters.values())]
        self._look([*left, *((name, one) for name, one in at_step.items() if name in self.parameters)])

    @staticmethod
    def _asked(parameters: Iterable[torch.nn.Parameter]) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters that may have a gradient: of a model with adapters most are frozen."""
        return (one for one in parameters if one.requires_grad)

    @torch.no_grad()
    def _look(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        alike = collections.defaultdict[Any, list[tuple[torch.Tensor, float]]](list)
        for name, gradient in gradients:
            if gradient is None:
                continue
            shard = shard_of(gradient)
            values = shard if shard.layout == torch.strided else shard.coalesce().values()
            if values.numel():
                bound = self.floors.get(name, 0.0) * math.sqrt(shard.numel())
                alike[values.device, values.dtype].append((values, bound))
        for (device, _), some in alike.items():
            sizes = norms([values for values, _ in some])
            # A NaN is past every floor.
            bounds = torch.tensor([bound for _, bound in some], dtype=sizes.dtype).to(device, non_blocking=True)
            self._passed.append(~(sizes <= bounds).all())

    def appeared(self) -> bool:
        """Return whether a gradient of the last look that has become known is past its floor, or was zero and is not.

        Raises:
            Exception: looking has failed amid the step.
        """
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._passed:
            device, passed = self._passed[0].device, [one.to(self._passed[0].device) for one in self._passed]
            self._any, self._passed = torch.stack(passed).any().to("cpu", non_blocking=True), []
            self._arrived = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            if self._arrived is not None:
                self._arrived.record(torch.cuda.current_stream(device))
        if self._any is None:
            return False
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return False
        appeared, self._any = bool(self._any), None
        self.found |= appeared
        return appeared


def _not_zero(outcome: Outcome) -> Iterator[tuple[str, float | None]]:
    """Yield the parameters of which a side had a gradient that was not zero, and its floor if it was below that."""
    gradients = outcome.comparisons.get("gradient")
    if gradients is None:
        return
    for name, one in gradients.differences.items():
        if one.rms != 0 or not one.equal:
            yield parameter_of(name), gradients.below_floor.get(name)
