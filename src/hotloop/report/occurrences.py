"""The events of a record as table rows in order of cost, and as marks on the chart of step times."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotloop.report.text import line, nth, number, place, seconds, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tone = Literal["good", "note", "warn", "bad"]

ROWS = 400
"""Rows of the events table at most; the other events are counted."""
MARKS = 600
"""Marks on a chart at most."""


class Kind(NamedTuple):
    """A kind of event: its label, how serious it is, and what is said of it, with the event's fields filled in.

    An event whose kind has no words is described by its reason.
    """

    label: str
    tone: Tone
    words: str = ""


KINDS = {
    "compiled": Kind("Compiled", "note", "{function}(), {phase} graph"),
    "recompiled": Kind("Recompiled", "warn"),
    "graph_break": Kind("Graph break", "warn"),
    "fallback": Kind("Fallback", "bad", "{from_preset} → {to_preset} ({stage}): {reason}"),
    "recompile_limit": Kind("Recompile limit", "bad"),
    "frame_eager": Kind("Frame eager", "warn"),
    "unavailable": Kind("Unavailable", "bad", "{preset}: {missing}; {running} runs instead"),
    "no_effect": Kind("No effect", "bad"),
    "run_failed": Kind("Run failed", "bad"),
    "captured": Kind("Captured", "note", "{function}(), {operations} operations"),
    "capture_dropped": Kind("Capture dropped", "warn"),
    "tier_proven": Kind("Tier proven", "good", "{tier} agrees with its reference on {steps} steps"),
    "tier_declined": Kind("Tier declined", "warn", "{tier}: {reason}"),
    "tier_changed": Kind("Tier changed", "note", "{from_tier} → {to_tier}: {reason}"),
    "step_undone": Kind("Step undone", "bad", "{tier}: {reason}"),
    "host_sync": Kind("Host sync", "warn"),
    "checkpoint_outside": Kind("Checkpoint outside", "warn", "torch.utils.checkpoint is around {function}"),
    "setting_switched": Kind("Setting switched", "note", "{setting}: {after}, by {by}"),
    "sentinel_disagreed": Kind("Sentinel disagreed", "bad", "{tier}: {reason}"),
}
"""Every known kind of event, in the order of a legend."""


@dataclasses.dataclass(frozen=True)
class EventRow:
    """Equal events as one row. ``cost`` is in seconds; ``about``: it is the extra time of the steps with the events."""

    kind: str
    label: str
    tone: Tone
    component: str
    first: float | None
    last: float | None
    count: int
    cost: float | None
    about: bool
    where: str
    reason: str
    hint: str
    source: str

    @classmethod
    def of(cls, group: Sequence[Mapping[str, Any]], extra: Mapping[float, float]) -> EventRow:
        """Return the row of equal events; ``extra`` are seconds that a step took over the steady ones."""
        kind = text(group[0].get("kind") or "event")
        steps = [step for event in group if (step := number(event.get("step"))) is not None]
        costs = [cost for event in group if (cost := number(event.get("seconds"))) is not None]
        about = not costs and kind in {"recompiled", "fallback"}
        if about:
            costs = [extra[step] for step in set(steps) if step in extra]
        return cls(
            kind=kind,
            label=kind_of(kind).label,
            tone=kind_of(kind).tone,
            component=text(group[0].get("component") or ""),
            first=min(steps, default=None),
            last=max(steps, default=None),
            count=len(group),
            cost=sum(costs) if costs else None,
            about=about and bool(costs),
            where=place(group[0]),
            reason=reason(group[0]),
            hint=next((line(event["hint"]) for event in group if event.get("hint")), ""),
            source=next((line(event["source"]) for event in group if event.get("source")), ""),
        )

    @property
    def steps(self) -> str:
        """The step, or the first and the last; empty if unknown."""
        if self.first is None or self.last is None:
            return ""
        first, last = nth(self.first), nth(self.last)
        return first if first == last else f"{first} … {last}"

    @property
    def cost_text(self) -> str:
        """The cost for people; empty if unknown."""
        return "" if self.cost is None else f"{'≈ ' if self.about else ''}{seconds(self.cost)}"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The events of one kind in one step, to be marked on a chart."""

    step: float
    kind: str
    label: str
    count: int
    reasons: tuple[str, ...]

    @classmethod
    def of(cls, step: float, kind: str, group: Sequence[Mapping[str, Any]], named: int = 3) -> Mark:
        """Return the mark of events of one kind in one step; the costliest are named, the others counted."""
        reasons = []
        for event in sorted(group, key=lambda event: -(number(event.get("seconds")) or 0.0))[:named]:
            cost = number(event.get("seconds"))
            parts = (reason(event), place(event), "" if cost is None else seconds(cost))
            reasons.append(" · ".join(part for part in parts if part))
        if len(group) > named:
            reasons.append(f"and {len(group) - named:,} more")
        return cls(step, kind, kind_of(kind).label, len(group), tuple(reasons))


def kind_of(name: str) -> Kind:
    """Return the kind of a name; a kind that this version does not know is labelled by its name."""
    return KINDS.get(name) or Kind(line(name.replace("_", " "), 40).capitalize(), "note")


def rows(events: Sequence[Mapping[str, Any]], extra: Mapping[float, float]) -> tuple[list[EventRow], int]:
    """Group equal events and order them by cost, then by how serious they are.

    Args:
        events: the record's events.
        extra: seconds that a step took over the steady ones, without the first step (its cost has many causes).

    Returns:
        The rows, and how many more there are.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for event in events:
        key = (text(event.get("kind") or "event"), text(event.get("component") or ""), place(event), reason(event))
        groups.setdefault(key, []).append(event)
    found = [EventRow.of(group, extra) for group in groups.values()]
    found.sort(key=lambda row: (-(row.cost or 0.0), _severity(row.tone), row.first or 0.0))
    return found[:ROWS], max(0, len(found) - ROWS)


def marks(events: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Group the events by step and kind; if there are too many, the most serious are kept."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in events:
        step = number(event.get("step"))
        if step is not None:
            groups.setdefault((step, text(event.get("kind") or "event")), []).append(event)
    # The sort is stable: of equally serious kinds the early ones are kept.
    kept = sorted(groups, key=lambda key: _severity(kind_of(key[1]).tone))[:MARKS]
    return [Mark.of(step, kind, groups[step, kind]) for step, kind in sorted(kept)]


def _severity(tone: Tone) -> int:
    return ("bad", "warn", "note", "good").index(tone)


def reason(event: Mapping[str, Any]) -> str:
    """Say in one line what happened, in the words of the event's kind."""
    kind = text(event.get("kind") or "event")
    if kind_of(kind).words:
        unknown = {"function": "?", "phase": "forward", "busy": "an unknown share", "share": "an unknown share"}
        fields = collections.defaultdict(lambda: text(None), unknown)
        for key, value in event.items():
            share = number(value) if key in ("busy", "share") else None
            if share is not None:
                fields[key] = f"{share:.0%}"
            elif key not in unknown or (value and key in ("function", "phase")):
                fields[key] = text(value)
        return line(kind_of(kind).words.format_map(fields) + _addition(kind, event))
    if event.get("reason"):
        return line(event["reason"])
    apart = {"kind", "component", "time", "step", "file", "line", "source", "hint", "seconds"}
    return line(", ".join(f"{text(key)}: {text(value)}" for key, value in event.items() if key not in apart))


def _addition(kind: str, event: Mapping[str, Any]) -> str:
    """Say what only some events of a kind have."""
    outside, said = event.get("outside"), ""
    if kind == "compiled" and event.get("cudagraphs_skipped"):
        said += f"; CUDA graphs skipped: {text(event['cudagraphs_skipped'])}"
    if kind == "compiled" and number(event.get("cache_hits")) and not number(event.get("cache_misses")):
        said += "; from the cache"
    if kind == "captured" and isinstance(outside, list | tuple) and outside:
        said += f"; outside of it: {', '.join(map(text, outside))}"
    if kind == "tier_proven" and event.get("worst"):
        said += f"; nearest to its limit: {text(event['worst'])}"
    return said
