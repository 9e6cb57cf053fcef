"""What one run leaves to the next in this process: how fast its tiers were, a child that still compiles, the credit.

A search or a cross-validation trains the same program again and again, with new instances. Their tiers need not be
timed again, only proven again: each instance has a recording of its own. Two runs train the same program where their
keys are equal (`hotloop.cache.key_of`).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.cache import BackgroundCompile, Key
    from hotloop.measure import Difference

_KEPT = 64
"""Programs that are remembered."""


@dataclasses.dataclass
class Child:
    """A background compile.

    Args:
        process: the child process.
        tier: the name of the tier that it compiles for.
        since: when it began, on the monotonic clock.
        expected: seconds that it was expected to take, as if no earlier child had been late.
        left: its run is over; the next run of the program goes on with it.
    """

    process: BackgroundCompile
    tier: str
    since: float
    expected: float | None
    left: bool = False


@dataclasses.dataclass
class ProgramHistory:
    """What earlier runs of this process found out about one program.

    Args:
        eager_seconds: of a step in the tier that runs begin in; None before any tier was timed beside it.
        ratios: by tier, a step's time over that of the tier that runs begin in, and the slow end of that ratio.
        faster: the tiers that beat the tier in force when they were timed.
        again_seconds: what it took a later run to get to a tier: the capture and the proof, nothing to compile.
        spreads: by step and tensor, how far two runs of the step were apart; the furthest yet.
        declines: how many runs declined a tier.
        ready: by base, seconds of the swap after a child has compiled it.
        child: the child that compiles just now.
        slower: how many times longer than expected a child took.
    """

    eager_seconds: float | None = None
    ratios: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    faster: set[str] = dataclasses.field(default_factory=set)
    again_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    spreads: dict[str, dict[str, Difference]] = dataclasses.field(default_factory=dict)
    declines: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ready: dict[str, float] = dataclasses.field(default_factory=dict)
    child: Child | None = None
    slower: float = 1.0

    def stop_child(self) -> None:
        """Stop the child that still compiles, if any."""
        child, self.child = self.child, None
        if child is not None:
            child.process.stop()


@dataclasses.dataclass
class _Store:
    programs: collections.OrderedDict[str, ProgramHistory] = dataclasses.field(default_factory=collections.OrderedDict)
    carried_seconds: float = 0.0


_store = _Store()


def program(key: Key) -> ProgramHistory:
    """Return what this process knows of a program; nothing yet, the first time."""
    programs = _store.programs
    history = programs.pop(str(key), None) or ProgramHistory()
    programs[str(key)] = history
    while len(programs) > _KEPT:
        programs.popitem(last=False)[1].stop_child()
    return history


def stop_left_children() -> None:
    """Stop the children that no run waits for: each takes cores and memory."""
    for known in _store.programs.values():
        if known.child is not None and known.child.left:
            known.stop_child()


def carried_seconds() -> float:
    """Return the seconds that earlier runs left to this one (`hotloop.decide.Standing.carried_seconds`)."""
    return _store.carried_seconds


def carry(seconds: float) -> None:
    """Add the seconds that a run leaves to the runs after it; negative if it spent more than it saved."""
    _store.carried_seconds += seconds


def forget() -> None:
    """Forget everything: the next run is the first one."""
    for known in _store.programs.values():
        known.stop_child()
    _store.programs.clear()
    _store.carried_seconds = 0.0
