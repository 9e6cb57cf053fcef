"""Advice and the ways that were measured, as rows for people, and the sentence that sums a diagnosis up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.remedies import REMEDIES
from hotloop.report.text import count, figure, in_package, line, number, place, seconds, short_place, size

if TYPE_CHECKING:
    from hotloop.report.occurrences import Tone

ROWS = 200
"""Pieces of advice that are shown; the others are counted."""
EAGER = "eager"
_LONG = 1_000
_TIMES = "x"


@dataclasses.dataclass(frozen=True)
class AdviceRow:
    """One piece of advice. ``costs`` are phrases, the measured ones first; ``remedy`` is what hotloop does itself."""

    rule: str
    label: str
    tone: Tone
    what: str
    cause: str
    change: str
    component: str
    where: str
    source: str
    costs: tuple[str, ...]
    remedy: str


@dataclasses.dataclass(frozen=True)
class WayRow:
    """One way to run the program. ``against`` is how many times as fast as eager it runs; ``note``: why it did not.

    ``step`` is a typical step, with its 95% interval in milliseconds where that was measured; ``cold`` what it took to
    get there, and whether torch's caches had a part of it.
    """

    name: str
    step: str
    against: str
    cold: str
    peak: str
    note: str


def advice(entries: Sequence[Mapping[str, Any]]) -> list[AdviceRow]:
    """Read the record's advice, which is in order already: the worst first."""
    return [_row(entry) for entry in entries[:ROWS]]


def ways(measured: Mapping[str, Any]) -> list[WayRow]:
    """Read the ways that were measured, in the record's order."""
    known = measured.get("ways")
    rows = known.items() if isinstance(known, Mapping) else ()
    found = {name: each for name, each in rows if isinstance(each, Mapping)}
    eager = found.get(EAGER, {})
    return [_way(name, each, eager) for name, each in found.items()]


def verdict(document: Mapping[str, Any]) -> str:
    """Sum a diagnosis up in a sentence or two; empty where the record holds neither ways nor advice."""
    entries = document.get("advice", ())
    rows = [row for row in ways(document.get("measurements", {})) if row.name != EAGER]
    if not rows and not entries:
        return ""
    asked = document.get("settings", {}).get("preset")
    best = next((row for row in rows if row.name == asked), rows[0] if rows else None)
    said = [_of_way(best)] if best is not None else []
    if not entries:
        return " ".join([*said, "Nothing to mend was found."])
    first = advice(entries[:1])[0]
    many = f"{count(len(entries), 'finding')}, the worst {first.label.lower()}" if len(entries) > 1 else first.label
    cost = f" ({', '.join(first.costs)})" if first.costs else ""
    here = first.where if first.where == place(entries[0]) else ""  # no line of an installed package is to be fixed
    start = f"fix {short_place(here, 1)} first" if here else f"first: {first.change}"
    return " ".join([*said, f"{many}{cost}; {start.rstrip('.')}."])


def _row(entry: Mapping[str, Any]) -> AdviceRow:
    rule = line(entry.get("rule") or "advice", 60)
    said = {key: line(entry.get(key) or "", _LONG) for key in ("what", "cause", "change", "source")}
    remedy = next((words for name, words in REMEDIES.items() if name == entry.get("remedy")), "")
    costs = tuple(_costs(entry))
    return AdviceRow(
        rule=rule,
        label=rule.replace("_", " ").capitalize(),
        tone="warn" if costs else "note",
        component=line(entry.get("component") or "", 80),
        where=in_package(place(entry)),
        costs=costs,
        remedy=f"hotloop.Loop {remedy}" if remedy else "",
        **said,
    )


def _costs(entry: Mapping[str, Any]) -> list[str]:
    """Phrase what it costs, as far as it was measured."""
    costs = []
    if step := number(entry.get("milliseconds")):
        costs.append(f"{seconds(step / 1e3)} a step")
    if once := number(entry.get("seconds")):
        costs.append(f"{seconds(once)} once")
    if compiles := number(entry.get("compiles")):
        costs.append(count(int(compiles), "compile"))
    if nbytes := number(entry.get("nbytes")):
        costs.append(size(nbytes))
    if (times := number(entry.get("times"))) and times > 1:
        costs.append(f"seen {figure(times)}{_TIMES}")
    return costs


def _way(name: Any, entry: Mapping[str, Any], eager: Mapping[str, Any]) -> WayRow:
    step, cold, peak = (number(entry.get(key)) for key in ("step_ms", "cold_seconds", "peak_bytes"))
    low, high = number(entry.get("step_ms_low")), number(entry.get("step_ms_high"))
    cached = " (cached)" if number(entry.get("cache_hits")) else ""
    base = number(eager.get("step_ms"))
    speed = number(entry.get("speed")) or (base / step if base and step else None)  # measured in pairs, if it was
    none = " (no difference)" if name != EAGER and _no_difference(entry, eager) else ""
    between = "" if low is None or high is None else f" ({seconds(low / 1e3)} to {seconds(high / 1e3)})"
    return WayRow(
        name=line(name, 80),
        step="" if step is None else f"{seconds(step / 1e3)}{between}",
        against=f"{figure(speed, 3)}{_TIMES}{none}" if speed else "",
        cold=f"{seconds(cold)}{cached}" if cold else "",
        peak="" if peak is None else size(peak),
        note=line(entry.get("failed") or "", _LONG),
    )


def _no_difference(entry: Mapping[str, Any], eager: Mapping[str, Any]) -> bool:
    """Tell whether a way is as fast as eager: as measured in pairs, or else by whether the intervals meet."""
    if "difference" in entry:
        return bool(entry["difference"] == "none")
    ends = [number(each.get(key)) for each in (entry, eager) for key in ("step_ms_low", "step_ms_high")]
    low, high, eager_low, eager_high = ends
    if low is None or high is None or eager_low is None or eager_high is None:
        return False
    return low <= eager_high and eager_low <= high


def _of_way(row: WayRow) -> str:
    if row.note:
        return f"{row.name} failed: {row.note.rstrip('.')}."
    if row.against:
        times, _, none = row.against.partition(" ")
        return f"{row.name}: {times} eager{none and ' '}{none}."
    return f"{row.name}: {row.step} a step." if row.step else f"{row.name} was not timed."
