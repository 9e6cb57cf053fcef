"""Gradients that were zero whenever compiled code was compared with eager: a proof says nothing of how they are made.

While LoRA's B is zero, so is the gradient of A: for all of a proof where gradients are accumulated, or a warm-up begins
with a rate of 0. Zero convolutions and adaLN-zero are alike, and a part that thaws has had no gradient at all. So
proven code is in force, and at the first gradient that no proof has seen it is proven again.

At first each step is looked at, later one in so many that the distance is a share of the steps since the proof. A look
is a few launches; the host reads it some steps later, once the device has got there, and waits for nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from hotloop._torch.sharded import shard_of
from hotloop.step.prove.outcomes import parameter_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.state.undo import WriteWatch

SHARE = 64
"""So many looks at first, and so many for each further e-fold of steps: a gradient is noticed late by 1/64 of them."""


class Unseen:
    """The parameters whose gradients no proof of some compiled code has seen.

    Args:
        parameters: them, by name.
        rest: steps before the first look.

    Attributes:
        found: a gradient was no longer zero.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], rest: int = 0) -> None:
        self.parameters, self.rest, self.found = dict(parameters), rest, False
        self._ids = {id(parameter) for parameter in parameters.values()}
        self._steps, self._next = 0, 1 + rest
        self._sizes: list[torch.Tensor] = []
        self._size: torch.Tensor | None = None
        """The largest element of the last look, on its way to the host."""
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
            before: what the last proof of the same code had not seen.
        """
        seen = {name for outcome in outcomes for name in _seen(outcome)}
        left = {name: parameter for name, parameter in parameters.items() if name not in seen}
        again = before is not None and before.found and before.parameters.keys() == left.keys()
        return cls(left, max(SHARE, 2 * before.rest) if before is not None and again else 0)

    def due(self) -> bool:
        """Count a step; return whether to look at its gradients."""
        self._steps += 1
        if not self.parameters or self._steps < self._next or self._size is not None:
            return False
        self._next = self._steps + max(1, self._steps // SHARE)
        return True

    @contextlib.contextmanager
    def looking(self, writes: WriteWatch) -> Iterator[None]:
        """Look at what optimizers read in the block."""
        writes.tell = self.look_before
        try:
            yield
        finally:
            writes.tell = None

    def look_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients that an optimizer is about to read."""
        parameters = (one for group in optimizer.param_groups for one in group["params"] if id(one) in self._ids)
        self._look(parameter.grad for parameter in parameters)

    def look_after(self, at_step: Mapping[str, torch.Tensor]) -> None:
        """Look at the gradients that a step has left, and at those that its optimizers have read in a replay."""
        left = [parameter.grad for parameter in self.parameters.values()]
        self._look([*left, *(one for name, one in at_step.items() if name in self.parameters)])

    @torch.no_grad()
    def _look(self, gradients: Iterable[torch.Tensor | None]) -> None:
        shards = [shard_of(one) for one in gradients if one is not None]
        values = [one if one.layout == torch.strided else one.coalesce().values() for one in shards]
        if some := [one for one in values if one.numel()]:
            self._sizes.append(torch.nn.utils.get_total_norm(some, torch.inf))

    def appeared(self) -> bool:
        """Return whether a gradient of the last look that has become known is not zero."""
        if self._sizes:
            device, sizes = self._sizes[0].device, [size.to(self._sizes[0].device) for size in self._sizes]
            self._size, self._sizes = torch.stack(sizes).amax().to("cpu", non_blocking=True), []
            self._arrived = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            if self._arrived is not None:
                self._arrived.record(torch.cuda.current_stream(device))
        if self._size is None:
            return False
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return False
        appeared, self._size = bool(self._size), None
        self.found |= appeared
        return appeared


def _seen(outcome: Outcome) -> Iterable[str]:
    """Yield the parameters of which a side of a comparison had a gradient that was not zero."""
    gradients = outcome.comparisons.get("gradient")
    for name, one in gradients.differences.items() if gradients is not None else ():
        if one.rms != 0 or not one.equal:
            yield parameter_of(name)
