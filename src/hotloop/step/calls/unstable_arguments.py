"""Finds the argument that differs in each call, so that the calls of a step never are of a kind that comes again."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any

from hotloop.step.naming import with_article
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Signature
    from hotloop.step.calls.aliasing import Aliasing

FRESH = 16
"""Consecutive calls, each with another object or value, after which the argument is taken to differ in every call."""


class UnstableArguments:
    """The arguments that differed in all consecutive calls of one step, as far as these calls were of a new kind.

    Args:
        argument: returns the name of an argument that its user knows.
    """

    def __init__(self, argument: Callable[[str], str]) -> None:
        self._argument = argument
        self._calls = 0
        self._seen: dict[Any, set[Any]] = {}
        """The values of each argument, and each attribute of a tensor, that differed in all consecutive calls."""

    def obstacle(self, inputs: Signature, aliasing: Aliasing, *, new: bool) -> Obstacle | None:
        """Return which argument prevents a recording, if one does; an argument that is new in each call only once.

        Args:
            inputs: the signature of a call.
            aliasing: the rest of the call's key.
            new: no call of the same kind came before.
        """
        for name, type_name in inputs.unhashed().items() if not inputs.exact else ():
            what = f"argument {self._argument(name)} cannot be compared from call to call: it is"
            hint = "pass tensors, numbers and strings, alone or in lists and mappings"
            return Obstacle(f"{what} {with_article(type_name)}", hint)
        if aliasing.attributes and (found := aliasing.obstacle([*map(self._argument, inputs.names())])) is not None:
            return found
        if not new:
            self._seen, self._calls = {}, 0
            return None
        if self._calls == FRESH:  # it was reported
            return None
        values: dict[Any, Any] = {**inputs.values(), **aliasing.values()}
        still = {place: one for place, one in values.items() if place in self._seen and one not in self._seen[place]}
        if self._calls and not still:  # something else was new: a shape, for example
            self._calls = 0
        if self._calls:
            self._seen = {place: {*self._seen[place], value} for place, value in still.items()}
        else:
            self._seen = {place: {value} for place, value in values.items()}
        self._calls += 1
        return self._obstacle_at(inputs, next(iter(self._seen))) if self._seen and self._calls == FRESH else None

    def _obstacle_at(self, inputs: Signature, place: int | tuple[int, str]) -> Obstacle:
        if isinstance(place, tuple):
            name = self._argument(inputs.names()[place[0]])
            what = f"argument {name} has an attribute {place[1]}, another one in each of {FRESH} calls"
            hint = "pass it as a tensor, as an argument of its own, or leave it out of the step"
            return Obstacle(f"{what}: each value selects a recording of its own", hint)
        name, kind = self._argument(inputs.names()[place]), inputs.leaves[place][0]
        what = f"argument {name} is {with_article(kind.__name__)}, and another one in each of {FRESH} calls"
        if place in inputs.objects():
            return Obstacle(what, "pass tensors, alone or in a dict or a dataclass, or the same object in each call")
        hint = "leave it out of the step; an argument of a few values that come again (update=True) may stay"
        if issubclass(kind, numbers.Number):
            hint = f"pass it as a tensor, torch.tensor({name}), which one recording takes whatever its value, or {hint}"
        return Obstacle(f"{what}: each value selects a recording of its own", hint)
