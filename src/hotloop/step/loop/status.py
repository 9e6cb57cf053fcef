"""What a loop runs, what that saves, and why: one object for people (a table) and for code (JSON)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.step.prove.check import SentinelStatus
    from hotloop.step.state.memory_limit import MemoryUse


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierStatus:
    """One tier: ``state`` is ``in force``, ``proven``, ``trying``, ``declined`` or ``timed``; times in seconds.

    ``why`` says why it is declined, what it lacks before it is proven, or why the first steps run as given.
    """

    name: str
    state: str
    steps: int = 0
    step_seconds: float | None = None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class StaleSteps:
    """Steps, counted from 1, that may have used an old value: ``operation`` is the first that a later check saw differ.

    ``file`` and ``line`` are the user's line that runs it; None where it has none.
    """

    first_step: int
    last_step: int
    operation: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        at = f" at {self.file}:{self.line}" if self.file is not None else ""
        return f"steps {self.first_step:,} to {self.last_step:,} may have used an old value: {self.operation}{at}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopStatus(Shown):
    """The status of a loop.

    Args:
        asked: what ``run=`` asked for.
        tier: what steps run in now: the one that was proven, though the last call was of a kind that runs eager (a
            short last batch); with several kinds of calls of which one was declined, what the last call ran in.
        step: steps done.
        step_seconds: of a typical step now; None before it is known.
        eager_seconds: of a typical step of the model as it was given.
        seconds_saved: by the steps done so far, against that, before the costs below; can be negative.
        prepare_seconds: spent on compiling, capturing and proving.
        tiers: what is known of each tier.
        decisions: each with its reason, in order.
        undone: steps that failed in a tier, and were undone and run eagerly.
        dropped: recordings that no longer fitted, with what changed.
        stale: steps that were replayed though what they do had changed, as far as that is known.
        compiled: of each compiled component, how often its graphs broke, how often it was recompiled, and where.
        sentinels: of each decorated step, how often it was also run eagerly and compared, and what was found.
        closed: the loop was closed: ``tier`` is what it ended in, and steps run eager from then on.
        memory: the device memory that torch had taken, in bytes; None on a CPU.
        without_update: many steps after which none of the loop's optimizers has stepped yet; 0 where one has.
    """

    asked: str
    tier: str
    step: int
    step_seconds: float | None
    eager_seconds: float | None
    seconds_saved: float
    prepare_seconds: float
    tiers: tuple[TierStatus, ...] = ()
    decisions: tuple[str, ...] = ()
    undone: int = 0
    dropped: tuple[str, ...] = ()
    stale: tuple[StaleSteps, ...] = ()
    compiled: tuple[str, ...] = ()
    sentinels: tuple[SentinelStatus, ...] = ()
    closed: bool = False
    without_update: int = 0
    memory: MemoryUse | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        return dataclasses.asdict(self)

    def __rich__(self) -> Group:
        title = f"hotloop: {self.tier} at step {self.step:,}" + (
            f" (asked for: {self.asked})" if self.asked != self.tier else ""
        )
        title += "; closed: steps run eager from then on" if self.closed else ""
        table = Table(title=Text(title, style="table.title"), title_justify="left", show_edge=False)
        for column in ("tier", "state", "steps", "ms a step", "why"):
            table.add_column(column, justify="right" if column in ("steps", "ms a step") else "left", overflow="fold")
        for tier in self.tiers:
            milliseconds = "" if tier.step_seconds is None else f"{1e3 * tier.step_seconds:.2f}"
            table.add_row(tier.name, tier.state, f"{tier.steps:,}", milliseconds, Text(tier.why))
        saved = round(self.seconds_saved, 1) + 0.0  # -0.0 reads oddly
        many = f"no optimizer of the loop has stepped in {self.without_update:,} steps: "
        notes = [f"{many}call optimizer.step(), unless the step updates by hand"] if self.without_update else []
        notes += [f"saved {saved:.1f} s so far, {self.prepare_seconds:.1f} s spent on preparing and proving"]
        notes += [str(self.memory)] if self.memory is not None else []
        notes += [f"undone: {self.undone} steps"] if self.undone else []
        notes += [*self.compiled, *map(str, self.sentinels)]
        notes += [*map(str, self.stale[-3:])]
        notes += [f"recorded anew: {reason}" for reason in self.dropped[-3:]]
        notes += [f"decided: {line}" for line in self.decisions[-5:]]
        return Group(table, Text("\n".join(notes)))
