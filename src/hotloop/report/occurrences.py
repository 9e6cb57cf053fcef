"""The events of a record as table rows, the most serious first, and as marks on the chart of step times."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hotloop.report.text import flat, line, nth, number, place, quantity, seconds, text, words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Tone = Literal["good", "note", "warn", "bad"]

ROWS = 400
"""Rows of the events table at most; the other events are counted."""
MARKS = 600
"""Marks on a chart at most."""
LENGTH = 1000
"""Characters of a reason or a setting that are shown."""


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
"""Every known kind of event."""


@dataclasses.dataclass(frozen=True)
class EventRow:
    """One event, decision or verdict as a row of a table. ``cost`` is its time in words."""

    label: str
    tone: Tone
    component: str
    step: str
    cost: str
    where: str
    reason: str
    hint: str
    source: str

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> EventRow:
        """Return the row of an event; what it does not say is empty."""
        kind, step, cost = kind_of(event), number(event.get("step")), number(event.get("seconds"))
        return cls(
            label=kind.label,
            tone=kind.tone,
            component=line(event.get("component") or ""),
            step="" if step is None else nth(step),
            cost="" if cost is None else seconds(cost),
            where=place(event),
            reason=reason(event),
            hint=line(event.get("hint") or ""),
            source=line(event.get("source") or ""),
        )

    @classmethod
    def decided(cls, entry: Mapping[str, Any]) -> EventRow:
        """Return the row of a decision or a verdict: what was decided names it, and its figures follow the reason."""
        title = next((key for key in ("verdict", "action", "choice", "decision") if entry.get(key)), "")
        apart = {title, "kind", "component", "reason", "file", "line", "time", "step", "hint", "source", "worst"}
        known = ((key, value) for key, value in flat(entry) if key.split(".")[0] not in apart and value is not None)
        figures = ", ".join(f"{words(key).lower()} {line(quantity(key, value))}" for key, value in known)
        said = reason(entry) if text(entry.get("kind")) in KINDS else line(entry.get("reason") or "", LENGTH)
        return dataclasses.replace(cls.of(entry), label=line(entry.get(title, ""), 120), reason=said, source=figures)


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
        """Return the mark of events of one kind in one step; a few are named, the others counted."""
        reasons = [" · ".join(filter(None, (reason(event), place(event)))) for event in group[:named]]
        more = [f"and {len(group) - named:,} more"] if len(group) > named else []
        return cls(step, kind, kind_of(group[0]).label, len(group), (*reasons, *more))


def kind_of(event: Mapping[str, Any]) -> Kind:
    """Return the kind of an event; a kind that this version does not know is labelled by its name."""
    name = _name(event)
    return KINDS.get(name) or Kind(line(name.replace("_", " "), 40).capitalize(), "note")


def rows(events: Sequence[Mapping[str, Any]]) -> tuple[list[EventRow], int]:
    """Return the rows of the most serious events in their order, and how many more there are."""
    shown = sorted(events, key=_severity)[:ROWS]
    return [EventRow.of(event) for event in shown], len(events) - len(shown)


def marks(events: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Group the events by step and kind; if there are too many, the most serious are kept."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in sorted(events, key=_severity):
        step = number(event.get("step"))
        if step is not None:
            groups.setdefault((step, _name(event)), []).append(event)
    kept = list(groups.items())[:MARKS]
    return [Mark.of(step, kind, group) for (step, kind), group in sorted(kept, key=lambda item: item[0])]


def _name(event: Mapping[str, Any]) -> str:
    return text(event.get("kind") or "event")


def _severity(event: Mapping[str, Any]) -> int:
    return ("bad", "warn", "note", "good").index(kind_of(event).tone)


def reason(event: Mapping[str, Any]) -> str:
    """Say in one line what happened, in the words of the event's kind."""
    said = kind_of(event).words
    if said:
        return line(said.format_map(_fields(event)))
    if event.get("reason"):
        return line(event["reason"])
    apart = {"kind", "component", "time", "step", "file", "line", "source", "hint", "seconds"}
    return line(", ".join(f"{text(key)}: {text(value)}" for key, value in event.items() if key not in apart))


def _fields(event: Mapping[str, Any]) -> Mapping[str, str]:
    """Return what an event says by its names, shares in percent; a name that it lacks is a dash."""
    fields = collections.defaultdict(lambda: text(None), {key: text(value) for key, value in event.items()})
    share = number(event.get("share"))
    if share is not None:
        fields["share"] = f"{share:.0%}"
    return fields
