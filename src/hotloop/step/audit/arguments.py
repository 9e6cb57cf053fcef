"""A step's arguments before and after it ran: what it took out of a dict it would not find another time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import attributes_of
from hotloop.measure import flatten, signature
from hotloop.step.guard.changes import RETURN_IT
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_STRIDED_ONLY = (
    "where it is the same in each step, have the step read it from outside of its arguments; else pass its indices and "
    "values, and make the sparse tensor of them in the step"
)
_COPY_IT = "work on a copy: batch = dict(batch), or read what it holds without taking it out"


def named(args: Any, kwargs: Any) -> dict[tuple[str, str], Any]:
    """Return a call's arguments by name, with the entries of containers and the attributes put on tensors."""
    given = dict(zip(signature(args, kwargs).names(), flatten((args, kwargs))[0], strict=True))
    found = {(name, ""): one for name, one in given.items()}
    for name, one in given.items():
        if isinstance(one, torch.Tensor):
            found |= {(name, attribute): value for attribute, value in attributes_of(one).items()}
    return found


def found_in_arguments(
    before: Mapping[tuple[str, str], Any], now: Mapping[tuple[str, str], Any], shown: Callable[[str], str]
) -> list[Obstacle]:
    """Return what is wrong with what a step was handed.

    Args:
        before: the arguments as they were before the step, by name.
        now: as they are after it.
        shown: returns what an argument is called.
    """
    found, nothing = [], object()
    changed = [one for one in {**before, **now} if before.get(one, nothing) is not now.get(one, nothing)]
    if changed:
        name, attribute = changed[0]
        of = f"{attribute}, which is an attribute of" if attribute else "the dict or list that holds"
        reason = f"the step changes {of} its argument {shown(name)}"
        found.append(Obstacle(reason, RETURN_IT if attribute else _COPY_IT, not_repeatable=True))
    for (name, _), one in before.items():
        if isinstance(one, torch.Tensor) and one.layout != torch.strided:
            reason = f"argument {shown(name)} has layout {one.layout}, which no recording copies"
            found.append(Obstacle(reason, _STRIDED_ONLY))
    return found
