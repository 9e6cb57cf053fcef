"""The shapes that a step sees: which of them compiled code may see, and what to do if there are many."""

from __future__ import annotations

import collections
import inspect
from typing import TYPE_CHECKING, Any

from hotloop.measure import Census, Signature, signature

if TYPE_CHECKING:
    from collections.abc import Callable

RECURS = 3
"""How often a shape must come before compiled code sees it for the first time: a short last batch never does."""
_LATEST = 40
"""The latest steps, among which new shapes are counted."""
_ADVISE_AFTER = 100
"""Steps after which, and in which, sizes that keep changing lead to advice."""
_KNOWN = 4096
"""The most kinds of inputs that are remembered."""


class Shapes:
    """The shapes of one step's arguments, counted.

    Args:
        step: the user's function, for the names of its arguments.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.census = Census()
        self._step, self._advised = step, False
        self._compiled: dict[str, set[Signature]] = collections.defaultdict(set)
        self._latest: collections.deque[bool] = collections.deque(maxlen=_LATEST)

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Count one call's shapes, and return them."""
        inputs = signature(args, kwargs)
        self.census.note(inputs)
        return inputs

    def compiled(self, base: str, inputs: Signature) -> bool:
        """Return whether compiled code has seen these shapes."""
        return inputs in self._compiled[base]

    @property
    def many(self) -> bool:
        """Whether over a quarter of the latest steps had new shapes: torch then makes one code of them all."""
        return len(self._latest) == _LATEST and sum(self._latest) > _LATEST / 4

    def count(self, base: str, inputs: Signature) -> None:
        """Count a call in a tier with compiled code."""
        self._latest.append(inputs not in self._compiled[base])

    def wanted(self, base: str, inputs: Signature) -> bool:
        """Return whether compiled code should see these shapes; shapes that are new to it are compiled once more."""
        known = self._compiled[base]
        recurs = self.census.counts.get(inputs, 0) >= RECURS
        # ``update=last``: models are called with the same shapes, and nothing is compiled anew.
        return not known or inputs in known or self.many or recurs or any(map(inputs.but_for_flags, known))

    def saw(self, base: str, inputs: Signature) -> None:
        """Note that compiled code has seen these shapes."""
        known = self._compiled[base]
        if len(known) == _KNOWN:  # a value or an object that is new in each call
            known.clear()
        known.add(inputs)

    def advice(self) -> str:
        """Return, once, which argument to put in buckets if its sizes keep changing; empty otherwise."""
        steps = self.census.steps
        if self._advised or not steps or steps % _ADVISE_AFTER or self.census.new_in_last(_ADVISE_AFTER) < _LATEST:
            return ""
        varying = max(self.census.varying_dims(), key=lambda dim: dim.distinct, default=None)
        if varying is None:
            return ""
        self._advised = True
        name = self.argument(varying.name)
        return (
            f"{name} had {varying.distinct} sizes in dimension {varying.dim}, {varying.least} to {varying.most}: each "
            "new one costs set-up time, and is not captured. Declare a few sizes to pad to, "
            f"buckets={{{name!r}: hotloop.Pad(dim={varying.dim}, value=..., to=(..., {varying.most}))}}"
        )

    def argument(self, name: str) -> str:
        """Return the name that a user knows, and `buckets` takes: of the argument, or of the entry in a mapping."""
        if "." in name:
            return name.rpartition(".")[2]
        if name.startswith("args["):
            index = int(name.removeprefix("args[").partition("]")[0])
            parameters = list(inspect.signature(self._step).parameters)
            return parameters[index] if index < len(parameters) else name
        return name
