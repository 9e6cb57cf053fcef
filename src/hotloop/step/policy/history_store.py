"""What one run leaves to the next in this process: how fast its tiers were, a child that still compiles, the credit.

A search or a cross-validation trains the same program again and again, with new instances. What was found out about its
tiers by timing them side by side need not be found out again, only proven again: each instance's recording is its own.
Two runs train the same program where their keys are equal (`hotloop.cache.key_of`).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.cache import BackgroundCompile, Key, Recorder
    from hotloop.measure import Difference

_KEPT = 64
"""Programs that are remembered."""
_DECLINES = 2
"""Runs that declined a tier before further ones leave it alone."""


@dataclasses.dataclass
class Child:
    """A background compile that outlived the run that began it, and the tier that it compiles for."""

    process: BackgroundCompile
    tier: str


@dataclasses.dataclass
class Program:
    """What earlier runs of this process found out about one program.

    Args:
        eager_seconds: of a step in the tier that runs begin in; None before any tier was timed beside it.
        ratios: of each tier, a step there over one in the tier that runs begin in, and the slow end of that.
        faster: the tiers that beat what was in force when they were timed.
        again_seconds: what it took a later run to get to a tier: the capture and the proof, nothing to compile.
        spreads: by step, how far it was from itself when it was run twice: of each tensor, the furthest yet.
        declines: how many runs declined a tier.
        recorder: the calls that a child compiles.
        ready: by base, seconds of the swap after a child has compiled it.
        child: one that is still at it.
        slower: how many times longer than expected a child took.
    """

    eager_seconds: float | None = None
    ratios: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    faster: set[str] = dataclasses.field(default_factory=set)
    again_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    spreads: dict[str, dict[str, Difference]] = dataclasses.field(default_factory=dict)
    declines: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recorder: Recorder | None = None
    ready: dict[str, float] = dataclasses.field(default_factory=dict)
    child: Child | None = None
    slower: float = 1.0

    def hopeless(self, tier: str) -> bool:
        """Tell whether so many runs declined a tier that the next one need not try."""
        return self.declines[tier] >= _DECLINES


_programs: collections.OrderedDict[str, Program] = collections.OrderedDict()


@dataclasses.dataclass
class _Carried:
    seconds: float = 0.0


_carried = _Carried()


def program(key: Key) -> Program:
    """Give what this process knows of a program; nothing yet, the first time."""
    found = _programs.pop(str(key), None) or Program()
    _programs[str(key)] = found
    while len(_programs) > _KEPT:
        _drop(_programs.popitem(last=False)[1])
    return found


def leave(here: Program, child: Child) -> None:
    """Leave a child to the next run of a program; no other one is left, since each takes cores and memory."""
    for one in _programs.values():
        _drop(one)
    here.child = child


def children() -> list[BackgroundCompile]:
    """Give the background compiles that are left to coming runs."""
    return [one.child.process for one in _programs.values() if one.child is not None]


def _drop(one: Program) -> None:
    child, one.child = one.child, None
    if child is not None:
        child.process.stop()


def carried_seconds() -> float:
    """Give what the runs so far that share left of the promise (`hotloop.decide.Standing.carried_seconds`)."""
    return _carried.seconds


def carry(seconds: float) -> None:
    """Add what a run that shares leaves of the promise; negative where it spent more than it saved."""
    _carried.seconds += seconds


def forget() -> None:
    """Forget everything: the next run is the first one."""
    for one in _programs.values():
        _drop(one)
    _programs.clear()
    _carried.seconds = 0.0
