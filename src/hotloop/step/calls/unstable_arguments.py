"""Finds the argument that keeps the calls of a step from being of a kind that comes again: it is another in each."""

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
"""Calls that follow each other, each with another object or value, after which none is taken to come again."""
_THE_SAME = "pass tensors, alone or in a dict or a dataclass, or the same object in each call"
_TENSORS = "pass tensors, numbers and strings, alone or in lists and mappings"
_LEAVE_IT_OUT = "leave it out of the step; an argument of a few values that come again (update=True) may stay"

_OF_ITS_OWN = "pass it as a tensor, as an argument of its own, or leave it out of the step"


class UnstableArguments:
    """Follows the calls of one step whose kind is new.

    Args:
        argument: gives the name of an argument that its user knows.
    """

    def __init__(self, argument: Callable[[str], str]) -> None:
        self._argument = argument
        self._calls = 0
        self._seen: dict[Any, set[Any]] = {}
        """What each place, and each attribute of a tensor, had in the calls that follow each other, where it was
        another in each of them."""

    def obstacle(self, inputs: Signature, apart: Aliasing, *, new: bool) -> Obstacle | None:
        """Say which argument is in the way of a recording, if one is; of what is new in each call, once.

        Args:
            inputs: of a call.
            apart: what tells it apart beside these.
            new: no call of its kind came before.
        """
        for name, type_name in inputs.unhashed().items() if not inputs.exact else ():
            what = f"argument {self._argument(name)} cannot be compared from call to call: it is"
            return Obstacle(f"{what} {with_article(type_name)}", _TENSORS)
        if apart.attributes and (obstacle := apart.obstacle([*map(self._argument, inputs.names())])) is not None:
            return obstacle
        if not new:
            self._seen, self._calls = {}, 0
            return None
        if self._calls == FRESH:  # it was said
            return None
        values: dict[Any, Any] = {**inputs.values(), **apart.values()}
        still = {place: one for place, one in values.items() if place in self._seen and one not in self._seen[place]}
        if self._calls and not still:  # something else was new: a shape, say
            self._calls = 0
        self._seen = {
            place: {*(self._seen[place] if self._calls else ()), one}
            for place, one in (still if self._calls else values).items()
        }
        self._calls += 1
        return self._of(inputs, next(iter(self._seen))) if self._seen and self._calls == FRESH else None

    def _of(self, inputs: Signature, place: int | tuple[int, str]) -> Obstacle:
        if isinstance(place, tuple):
            name = self._argument(inputs.names()[place[0]])
            what = f"argument {name} has an attribute {place[1]}, another one in each of {FRESH} calls"
            return Obstacle(f"{what}: each value selects a recording of its own", _OF_ITS_OWN)
        name, kind = self._argument(inputs.names()[place]), inputs.leaves[place][0]
        what = f"argument {name} is {with_article(kind.__name__)}, and another one in each of {FRESH} calls"
        if place in inputs.objects():
            return Obstacle(what, _THE_SAME)
        tensor = f"pass it as a tensor, torch.tensor({name}), which one recording takes whatever its value, or "
        hint = f"{tensor if issubclass(kind, numbers.Number) else ''}{_LEAVE_IT_OUT}"
        return Obstacle(f"{what}: each value selects a recording of its own", hint)
