"""Advice and the measured ways to run, as rows for people, and the sentence that sums a diagnosis up."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.remedies import REMEDIES
from hotloop.report.text import count, figure, line, number, place, seconds, short_place, size

if TYPE_CHECKING:
    from hotloop.report.occurrences import Tone

ROWS = 200
"""Pieces of advice that are shown; the others are counted."""


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

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> AdviceRow:
        """Return the row of one piece of advice of the record."""
        rule, costs = line(entry.get("rule") or "advice", 60), _costs(entry)
        words = {key: line(entry.get(key) or "", 1_000) for key in ("what", "cause", "change", "source")}
        remedy = next((words for name, words in REMEDIES.items() if name == entry.get("remedy")), "")
        return cls(
            rule=rule,
            label=rule.replace("_", " ").capitalize(),
            tone="warn" if costs else "note",
            component=line(entry.get("component") or "", 80),
            where=re.split(r"[/\\](?:site|dist)-packages[/\\]", place(entry))[-1],  # shown from the package's name on
            costs=costs,
            remedy=f"hotloop.Loop {remedy}" if remedy else "",
            **words,
        )


def _costs(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what a problem costs, as far as it was measured."""
    names = ("milliseconds", "seconds", "compiles", "nbytes", "times")
    step, once, compiles, nbytes, times = (number(entry.get(name)) or 0.0 for name in names)
    costs = [f"{seconds(step / 1e3)} a step"] if step else []
    costs += [f"{seconds(once)} once"] if once else []
    costs += [count(int(compiles), "compile")] if compiles else []
    costs += [size(nbytes)] if nbytes else []
    costs += [f"seen {figure(times)}x"] if times > 1 else []
    return tuple(costs)


@dataclasses.dataclass(frozen=True)
class WayRow:
    """One way to run the program. ``against`` is how many times as fast as eager it runs; ``note``: why it did not.

    ``step`` is a typical step, with its 95% interval if that was measured. ``cold`` is the time to get ready, and
    whether it includes torch's caches.
    """

    name: str
    step: str
    against: str
    cold: str
    peak: str
    note: str

    @classmethod
    def read(cls, name: Any, entry: Mapping[str, Any], eager: Mapping[str, Any]) -> WayRow:
        """Return the row of one way, compared with eager."""
        keys = ("step_ms", "cold_seconds", "peak_bytes", "step_ms_low", "step_ms_high")
        step, cold, peak, low, high = (number(entry.get(key)) for key in keys)
        base = number(eager.get("step_ms"))
        speed = number(entry.get("speed")) or (base / step if base and step else None)  # measured in pairs, if it was
        equal = " (within noise)" if name != "eager" and _is_no_difference(entry, eager) else ""
        between = "" if low is None or high is None else f" ({seconds(low / 1e3)} to {seconds(high / 1e3)})"
        cached = " (cached)" if number(entry.get("cache_hits")) else ""
        return cls(
            name=line(name, 80),
            step="" if step is None else f"{seconds(step / 1e3)}{between}",
            against=f"{figure(speed, 3)}x{equal}" if speed else "",
            cold=f"{seconds(cold)}{cached}" if cold else "",
            peak="" if peak is None else size(peak),
            note=line(entry.get("failed") or "", 1_000),
        )

    @property
    def sentence(self) -> str:
        """How fast the way is, or why it did not run."""
        if self.note:
            return f"{self.name} failed: {self.note.rstrip('.')}."
        if self.against:
            times, _, equal = self.against.partition(" ")
            return f"{self.name}: {times} eager {equal}".rstrip() + "."
        return f"{self.name}: {self.step} a step." if self.step else f"{self.name} was not timed."


def _is_no_difference(entry: Mapping[str, Any], eager: Mapping[str, Any]) -> bool:
    """Return whether a way is as fast as eager: as measured in pairs, or else by whether the intervals meet."""
    if "difference" in entry:
        return bool(entry["difference"] == "none")
    low, high = (number(entry.get(key)) for key in ("step_ms_low", "step_ms_high"))
    eager_low, eager_high = (number(eager.get(key)) for key in ("step_ms_low", "step_ms_high"))
    if low is None or high is None or eager_low is None or eager_high is None:
        return False
    return low <= eager_high and eager_low <= high


def ways(measured: Mapping[str, Any]) -> list[WayRow]:
    """Return the ways that were measured, in the record's order."""
    known = measured.get("ways")
    entries = known.items() if isinstance(known, Mapping) else ()
    found = {name: entry for name, entry in entries if isinstance(entry, Mapping)}
    return [WayRow.read(name, entry, found.get("eager", {})) for name, entry in found.items()]


def verdict(document: Mapping[str, Any]) -> str:
    """Sum a diagnosis up in a sentence or two; empty if the record holds neither ways nor advice.

    If the record holds a bench, its verdict is the sentence.
    """
    measured, entries = document.get("measurements", {}), document.get("advice", ())
    bench = measured.get("bench")
    if isinstance(bench, Mapping) and bench.get("verdict"):
        return line(bench["verdict"], 1_000)
    rows = [row for row in ways(measured) if row.name != "eager"]
    if not rows and not entries:
        return ""
    asked = document.get("settings", {}).get("preset")
    said = next((row.sentence for row in rows if row.name == asked), rows[0].sentence if rows else "")
    if not entries:
        return f"{said} Nothing to fix was found.".strip()
    first = AdviceRow.read(entries[0])
    many = f"{count(len(entries), 'finding')}, the worst {first.label.lower()}" if len(entries) > 1 else first.label
    cost = f" ({', '.join(first.costs)})" if first.costs else ""
    # Nobody is to fix a line of an installed package: there the change is named instead.
    in_program = first.where and first.where == place(entries[0])
    start = f"fix {short_place(first.where, 1)} first" if in_program else f"first: {first.change}"
    return f"{said} {many}{cost}; {start.rstrip('.')}.".strip()
