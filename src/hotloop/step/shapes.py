"""The shapes that a step sees: which of them compiled code may see, and what to do where there are many."""

from __future__ import annotations

import collections
import inspect
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.measure import Census, Inputs, signature

if TYPE_CHECKING:
    from collections.abc import Callable

RECURS = 3
"""How often a shape must come before compiled code that has not seen it may: a short last batch never does."""
_MANY = 0.25
"""Where more than this share of the latest steps have shapes of their own, waiting for one to recur is no use."""
_LATEST = 40
_ADVISE_AFTER = 100
_BUCKETS = 4


class Shapes:
    """Counts the shapes of one step's arguments.

    Args:
        step: the user's function, for the names of its arguments.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.census = Census()
        self._step = step
        self._compiled: dict[str, set[Inputs]] = collections.defaultdict(set)
        self._latest: collections.deque[bool] = collections.deque(maxlen=_LATEST)
        self._advised = False

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Count one call's shapes, and give them."""
        inputs = signature(args, kwargs)
        self.census.note(inputs)
        return inputs

    def compiled(self, base: str, inputs: Inputs) -> bool:
        """Tell whether compiled code has seen these shapes."""
        return inputs in self._compiled[base]

    @property
    def many(self) -> bool:
        """Tell whether most of the latest steps brought shapes or values of their own."""
        return len(self._latest) == _LATEST and sum(self._latest) > _MANY * _LATEST

    def may_compile(self, base: str, inputs: Inputs) -> bool:
        """Tell whether compiled code should see these shapes; where it has not yet, it is compiled once more.

        The first shapes may; others when they come back, or when most steps bring new ones: torch then makes the sizes
        dynamic, and one code serves all.
        """
        known = self._compiled[base]
        unseen = inputs not in known
        self._latest.append(unseen)
        if not unseen:
            return True
        seen = self.census.seen(inputs)
        if not known or self.many or (seen is not None and seen.count >= RECURS):
            known.add(inputs)
            return True
        return False

    def advice(self) -> str:
        """Say once which argument to put in buckets, where its sizes keep changing; empty otherwise."""
        due = self.census.steps and self.census.steps % _ADVISE_AFTER == 0
        if self._advised or not due or self.census.new_in_last(_ADVISE_AFTER) < _LATEST:
            return ""
        varying = max(self.census.varying_dims(), key=lambda dim: dim.distinct, default=None)
        if varying is None:
            return ""
        self._advised = True
        try:
            edges = self.census.suggest_buckets(varying.name, varying.dim, _BUCKETS, multiple=8)
        except ConfigError:
            return ""
        name = self._argument(varying.name)
        return (
            f"{name} had {varying.distinct} sizes in dimension {varying.dim}, {varying.least} to {varying.most}: each "
            "new one costs set-up time, and is not captured. Declare "
            f"buckets={{{name!r}: hotloop.Pad(dim={varying.dim}, value=..., to={edges.edges})}}, "
            f"which would pad {edges.waste:.0%}"
        )

    def _argument(self, name: str) -> str:
        """Give the name that `buckets` takes: of the argument, or of the entry in a mapping."""
        if "." in name:
            return name.rpartition(".")[2]
        if name.startswith("args["):
            index = int(name.removeprefix("args[").partition("]")[0])
            parameters = list(inspect.signature(self._step).parameters)
            return parameters[index] if index < len(parameters) else name
        return name
