"""Values that a trial has before a sampler is asked: known good ones, and those of a grid."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train.search.space import Searched, Space, flat, value_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.train.settings import Settings


def given(space: Space, settings: Settings, number: int) -> dict[str, Any]:
    """Return the values that the trial of a number has by ``hpo.enqueue`` or by a grid; the sampler chooses others."""
    known = settings.hpo.enqueue
    if number < len(known):
        return dict(flat(known[number]))
    if settings.hpo.sampler != "grid":
        return {}
    return next(itertools.islice(grid(space, settings), number - len(known), None), {})


def grid(space: Space, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield every combination of values, those of the last setting by turns first.

    Raises:
        ConfigError: a setting has no end of values.
    """
    for one in space.searched:
        if one.distinct() is None and not (one.kind == "int" and one.step is None):
            raise ConfigError(
                f"hpo.sampler=grid: hpo.space.{one.name} has no end of values: give it choices, a float or int range "
                "with a step, or take another sampler"
            )
    yield from _combined(space.searched, {}, settings)


def _combined(left: Sequence[Searched], chosen: dict[str, Any], settings: Settings) -> Iterator[dict[str, Any]]:
    if not left:
        yield chosen
        return
    one, *others = left
    varies = all(value_of(name, chosen, settings) in allowed for name, allowed in one.when.items())
    for more in ({one.name: value} for value in _every(one)) if varies else ({},):
        yield from _combined(others, {**chosen, **more}, settings)


def _every(one: Searched) -> Sequence[Any]:
    """Return all values of a setting."""
    if one.kind == "choices":
        return one.values
    (low, high), step = one.values, one.step or 1
    return [low + place * step for place in range(int((high - low) / step + 1e-9) + 1)]
