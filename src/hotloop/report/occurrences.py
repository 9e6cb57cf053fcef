"""The events of a record as table rows in order of cost, and as marks on the chart of step times."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from hotloop.report.text import line, nth, number, place, seconds, text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Tone = Literal["good", "note", "warn", "bad"]

ROWS = 400
"""Rows of the events table at most; what was left out is counted."""
MARKS = 600
"""Marks on a chart at most."""
REASONS = 3
"""Reasons that a mark names; the others are counted."""

KINDS: dict[str, tuple[str, Tone]] = {
    "compiled": ("Compiled", "note"),
    "recompiled": ("Recompiled", "warn"),
    "graph_break": ("Graph break", "warn"),
    "fallback": ("Fallback", "bad"),
    "recompile_limit": ("Recompile limit", "bad"),
    "frame_eager": ("Frame eager", "warn"),
    "unavailable": ("Unavailable", "bad"),
    "no_effect": ("No effect", "bad"),
    "run_failed": ("Run failed", "bad"),
    "captured": ("Captured", "note"),
    "capture_dropped": ("Capture dropped", "warn"),
    "tier_proven": ("Tier proven", "good"),
    "tier_declined": ("Tier declined", "warn"),
    "tier_changed": ("Tier changed", "note"),
    "step_undone": ("Step undone", "bad"),
    "host_sync": ("Host sync", "warn"),
    "host_bound": ("Host-bound", "warn"),
    "eager_part": ("Eager part", "note"),
    "checkpoint_outside": ("Checkpoint outside", "warn"),
    "setting_switched": ("Setting switched", "note"),
    "sentinel_disagreed": ("Sentinel disagreed", "bad"),
}
"""Label and tone of each kind of event, in the order in which a legend names them; of other kinds the name is shown."""
_SEVERITY: dict[Tone, int] = {"bad": 0, "warn": 1, "note": 2, "good": 3}


@dataclasses.dataclass(frozen=True)
class EventRow:
    """Equal events as one row. ``cost`` is in seconds; ``about``: it is the extra time of the steps they fell in."""

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

    @property
    def steps(self) -> str:
        """The step, or the first and the last; empty where it is not known."""
        if self.first is None or self.last is None:
            return ""
        first, last = nth(self.first), nth(self.last)
        return first if first == last else f"{first} … {last}"

    @property
    def cost_text(self) -> str:
        """The cost for people; empty where it is not known."""
        return "" if self.cost is None else f"{'≈ ' if self.about else ''}{seconds(self.cost)}"


@dataclasses.dataclass(frozen=True)
class Mark:
    """The events of one kind in one step, to be marked on a chart."""

    step: float
    kind: str
    label: str
    count: int
    reasons: tuple[str, ...]


def label(kind: str) -> str:
    """Give the kind of an event for people."""
    return KINDS[kind][0] if kind in KINDS else line(kind.replace("_", " "), 40).capitalize()


def tone(kind: str) -> Tone:
    """Give how serious a kind of event is."""
    return KINDS[kind][1] if kind in KINDS else "note"


def rows(events: Sequence[Mapping[str, Any]], extra: Mapping[float, float]) -> tuple[list[EventRow], int]:
    """Group equal events and order them by cost, then by how serious they are.

    Args:
        events: the record's events.
        extra: seconds that a step took over the steady ones, the first step left out (its cost has many causes).

    Returns:
        The rows, and how many more there are.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for event in events:
        key = (_kind(event), text(event.get("component") or ""), place(event), reason(event))
        groups.setdefault(key, []).append(event)
    found = [_row(key, group, extra) for key, group in groups.items()]
    found.sort(key=lambda row: (-(row.cost or 0.0), _SEVERITY[row.tone], row.first or 0.0))
    return found[:ROWS], max(0, len(found) - ROWS)


def marks(events: Sequence[Mapping[str, Any]]) -> list[Mark]:
    """Group the events by step and kind; the most serious are kept where there are too many."""
    groups: dict[tuple[float, str], list[Mapping[str, Any]]] = {}
    for event in events:
        step = number(event.get("step"))
        if step is not None:
            groups.setdefault((step, _kind(event)), []).append(event)
    kept = sorted(groups, key=lambda key: _SEVERITY[tone(key[1])])[:MARKS]  # a stable sort: of equals, the early ones
    return [_mark(step, kind, groups[step, kind]) for step, kind in sorted(kept)]


def reason(event: Mapping[str, Any]) -> str:
    """Say in one line what happened, by the fields of its kind."""
    kind = _kind(event)
    if kind in _REASONS:
        return line(_REASONS[kind](event))
    if event.get("reason"):
        return line(event["reason"])
    known = {"kind", "component", "time", "step", "file", "line", "source", "hint", "seconds"}
    return line(", ".join(f"{text(key)}: {text(value)}" for key, value in event.items() if key not in known))


def _compiled(event: Mapping[str, Any]) -> str:
    said = f"{text(event.get('function') or '?')}(), {text(event.get('phase') or 'forward')} graph"
    if event.get("cudagraphs_skipped"):
        said += f"; CUDA graphs skipped: {text(event['cudagraphs_skipped'])}"
    if number(event.get("cache_hits")) and not number(event.get("cache_misses")):
        said += "; from the cache"
    return said


def _fallback(event: Mapping[str, Any]) -> str:
    rungs = f"{text(event.get('from_preset'))} → {text(event.get('to_preset'))}"
    return f"{rungs} ({text(event.get('stage'))}): {text(event.get('reason'))}"


def _unavailable(event: Mapping[str, Any]) -> str:
    return f"{text(event.get('preset'))}: {text(event.get('missing'))}; {text(event.get('running'))} runs instead"


def _captured(event: Mapping[str, Any]) -> str:
    outside = event.get("outside")
    rest = f"; outside of it: {', '.join(map(text, outside))}" if isinstance(outside, list | tuple) and outside else ""
    return f"{text(event.get('function') or '?')}(), {text(event.get('operations'))} operations{rest}"


def _proven(event: Mapping[str, Any]) -> str:
    said = f"{text(event.get('tier'))} agrees with its reference on {text(event.get('steps'))} steps"
    return f"{said}; nearest to its limit: {text(event['worst'])}" if event.get("worst") else said


def _of_tier(event: Mapping[str, Any]) -> str:
    return f"{text(event.get('tier'))}: {text(event.get('reason'))}"


def _changed(event: Mapping[str, Any]) -> str:
    return f"{text(event.get('from_tier'))} → {text(event.get('to_tier'))}: {text(event.get('reason'))}"


def _share(event: Mapping[str, Any], key: str) -> str:
    known = number(event.get(key))
    return "an unknown share" if known is None else f"{known:.0%}"


def _busy(event: Mapping[str, Any]) -> str:
    return f"the device works {_share(event, 'busy')} of a step, in {text(event.get('kernels'))} kernels"


def _part(event: Mapping[str, Any]) -> str:
    return f"{text(event.get('part'))}: {_share(event, 'share')} of a step, {text(event.get('operations'))} operations"


def _around(event: Mapping[str, Any]) -> str:
    return f"torch.utils.checkpoint is around {text(event.get('function'))}"


def _switched(event: Mapping[str, Any]) -> str:
    values = f"{text(event.get('before'))} → {text(event.get('after'))}"
    return f"{text(event.get('setting'))}: {values}, by {text(event.get('by'))}"


_REASONS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "compiled": _compiled,
    "fallback": _fallback,
    "unavailable": _unavailable,
    "captured": _captured,
    "tier_proven": _proven,
    "tier_declined": _of_tier,
    "step_undone": _of_tier,
    "sentinel_disagreed": _of_tier,
    "tier_changed": _changed,
    "host_bound": _busy,
    "eager_part": _part,
    "checkpoint_outside": _around,
    "setting_switched": _switched,
}


def _kind(event: Mapping[str, Any]) -> str:
    return text(event.get("kind") or "event")


def _row(key: tuple[str, ...], group: Sequence[Mapping[str, Any]], extra: Mapping[float, float]) -> EventRow:
    kind, component, where, said = key
    steps = [step for event in group if (step := number(event.get("step"))) is not None]
    known = [cost for event in group if (cost := number(event.get("seconds"))) is not None]
    cost, about = (sum(known), False) if known else (None, False)
    if cost is None and kind in {"recompiled", "fallback"}:
        over = [extra[step] for step in set(steps) if step in extra]
        cost, about = (sum(over), True) if over else (None, False)
    hint = next((line(event["hint"]) for event in group if event.get("hint")), "")
    source = next((line(event["source"]) for event in group if event.get("source")), "")
    span = min(steps, default=None), max(steps, default=None)
    return EventRow(kind, label(kind), tone(kind), component, *span, len(group), cost, about, where, said, hint, source)


def _mark(step: float, kind: str, group: Sequence[Mapping[str, Any]]) -> Mark:
    by_cost = sorted(group, key=lambda event: -(number(event.get("seconds")) or 0.0))
    said = []
    for event in by_cost[:REASONS]:
        cost, where = number(event.get("seconds")), place(event)
        said.append(" · ".join(part for part in (reason(event), where, "" if cost is None else seconds(cost)) if part))
    if len(group) > REASONS:
        said.append(f"and {len(group) - REASONS:,} more")
    return Mark(step, kind, label(kind), len(group), tuple(said))
