"""The top of a report: what ran and how it ended in a sentence or two, and the most important numbers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.report.series import ENOUGH
from hotloop.report.text import (
    count,
    figure,
    flat,
    line,
    listing,
    mapping,
    moment,
    nth,
    number,
    quantity,
    seconds,
    short_place,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hotloop.report.charts import MetricRow
    from hotloop.report.components import Component
    from hotloop.report.occurrences import Tone
    from hotloop.report.series import Line, Steps

KILLED, THERE = "interrupted (killed)", "running on a cluster"
"""Of a record that says that it runs: its process is gone, or was not of this machine when the record was fetched."""
TOO_FEW_EAGER = "too few eager steps to tell"
_TONES: dict[str, Tone] = {"finished": "good", "running": "note", "interrupted": "warn", "pruned": "note"}
_TONES |= {"pending": "note", KILLED: "warn", THERE: "note"}


def standing(document: Mapping[str, Any]) -> str:
    """Return how a run or a cross-validation is doing, in words."""
    if record.was_killed(document):
        return KILLED
    status = line(document.get("status"), 40)
    return THERE if status == "running" and record.on_cluster(document) else status


def tone_of(status: str) -> Tone:
    """Return how serious a standing is."""
    return _TONES.get(status, "bad")


@dataclasses.dataclass(frozen=True)
class Note:
    """Something about the run that a reader must not miss."""

    tone: Tone
    text: str


@dataclasses.dataclass(frozen=True)
class Headline:
    """What ran, how it ended, and whether it ran as asked. ``notes`` are what a reader must not miss."""

    title: str
    status: str
    tone: Tone
    when: str
    sentence: str
    verdict: str
    notes: tuple[Note, ...]

    @classmethod
    def of(cls, document: Mapping[str, Any], steps: Steps, parts: Sequence[Component]) -> Headline:
        """Return the headline of a run."""
        status, settings = standing(document), dict(flat(document["settings"]))
        titles = (settings.get(key) for key in ("run_name", "run.name", "recipe", "recipe.name"))
        title = next((title for title in titles if title and isinstance(title, str)), None)
        return cls(
            title=line(title, 120) if title else "Training run",
            status=status,
            tone=tone_of(status),
            when=moment(document.get("created")),
            sentence=_sentence(document, steps, status),
            verdict=_verdict(parts),
            notes=tuple(_notes(document, steps)),
        )


def _sentence(document: Mapping[str, Any], steps: Steps, status: str) -> str:
    """Say how the run ended, after how many steps and how long."""
    begun, ended = number(document.get("created")), number(document.get("finished") or document.get("updated"))
    ran = -1.0 if begun is None or ended is None else ended - begun - (number(document.get("idle_seconds")) or 0.0)
    took = f" in {seconds(ran)}" if steps.entries and ran >= 0 else ""
    # A hot loop does not record every step, but it records how many it did, unless it was killed.
    counted = number(mapping(document.get("measurements")).get("steps_done"))
    last = number(steps.entries[-1].get("step")) if steps.entries else None
    done = int(counted or max(last or 0, len(steps.entries)))
    planned, sittings = number(document["settings"].get("total_steps")), number(document.get("starts")) or 0
    starts = f", in {int(sittings)} sittings" if sittings > 1 else ""
    if document.get("status") == "finished" and planned is not None and done < planned:
        return f"Ended at step {done:,} of {int(planned):,}{took}{starts}."
    return f"{status[:1].upper()}{status[1:]}: {count(done, 'step') if done else 'no step'}{took}{starts}."


def _verdict(parts: Sequence[Component], named: int = 3) -> str:
    """Say whether what was asked for is what ran; at most ``named`` components are named one by one."""
    if not parts:
        return "The record names no component, so it cannot say what ran compiled."
    if len(parts) > named and all(part.as_asked for part in parts):
        return f"All {len(parts)} components ran as asked."
    first = sorted(parts, key=lambda part: part.as_asked)[:named]
    phrases = [f"{part.name} {part.sentence}{_because(part)}" for part in first]
    if len(parts) > named:
        phrases.append(f"{len(parts) - named} more below")
    return "; ".join(phrases) + "."


def _because(part: Component) -> str:
    if part.as_asked or not part.causes:
        return ""
    cause = part.causes[0]
    where = f" ({short_place(cause.where)})" if cause.where else ""
    return f": {line(cause.reason, 160).rstrip('.')}{where}"


def _notes(document: Mapping[str, Any], steps: Steps) -> Iterator[Note]:
    if document.get("error") and document.get("status") != "interrupted":
        yield Note("note" if document.get("status") == "pruned" else "bad", line(document["error"], 1000))
    if wrong := steps.not_finite("loss"):
        where = f"{count(len(wrong), 'step')}, first in step {nth(wrong[0])}"
        yield Note("warn", f"The loss was not finite in {where}.")
    for cut in map(mapping, listing(document.get("cuts"))):
        if many := number(cut.get("steps")):
            again = f"{count(int(many), 'step')} that an earlier start did after it are left out here"
            yield Note("note", f"Resumed at step {line(cut.get('step'), 20)}: {again}.")
    if unread := number(document.get("unread_lines")):
        lines = count(int(unread), "line")
        yield Note("warn", f"{lines} of the record could not be read (a kill tears the last one).")


@dataclasses.dataclass(frozen=True)
class Card:
    """One of the headline's numbers, with its name and its source."""

    label: str
    value: str
    note: str = ""


_CARDS = {
    "steady_step_ms": ("Steady step", "measured"),
    "cold_seconds": ("Cold time", "first steps and compiles"),
    "speed_up": ("Speed-up", "over eager steps"),
    "seconds_saved": ("Saved", "before the cost of preparing"),
    "samples_per_second": ("Throughput", "samples, steady"),
    "peak_memory_bytes": ("Peak memory", "of the whole run"),
    "compile_seconds": ("Compile time", "all compiles together"),
}
"""The measurements that have a card: their labels and sources."""


def no_speed_up(measured: Mapping[str, Any], steps: Steps) -> str:
    """Say why no speed-up is told; empty where one is. ``auto`` times its own eager steps, and judges by itself."""
    if number(measured.get("eager_step_ms")) is not None:
        return ""
    eager = (entry for entry in steps.entries if entry.get("running") in ("none", "eager"))
    timed = sum(number(entry.get("seconds")) is not None for entry in eager)
    return "" if timed >= ENOUGH else TOO_FEW_EAGER


def cards(
    measured: Mapping[str, Any], steps: Steps, times: Line, metrics: Sequence[MetricRow], *, goes_on: bool = False
) -> list[Card]:
    """Return a run's most important numbers; a measured number goes before an estimate."""
    found = {}
    if times.steady is not None:
        found["steady_step_ms"] = Card("Steady step", seconds(times.steady), "median of the later half")
    if times:
        found["cold_seconds"] = Card("First step", seconds(times.values[0]), "compiles included")
    for key, (label, note) in _CARDS.items():
        if number(measured.get(key)) is not None:
            found[key] = Card(label, quantity(key, measured[key]), note)
    if "speed_up" in found and (why := no_speed_up(measured, steps)):
        found["speed_up"] = Card("Speed-up", "\N{EN DASH}", why)
    ordered = [found[key] for key in _CARDS if key in found]
    return [*ordered, *_best_metric(metrics), *_final_loss(steps, goes_on=goes_on)]


def _best_metric(metrics: Sequence[MetricRow]) -> list[Card]:
    """Return the first of the usual metrics that was recorded outside of training."""
    rows = {row.name.lower(): row for row in reversed(metrics) if "train" not in row.split.lower()}
    row = next((rows[name] for name in ("f1", "auc", "auroc", "accuracy") if name in rows), None)
    if row is None:
        return []
    name = row.name.upper() if row.name in ("f1", "auc", "auroc") else row.name
    return [Card(f"Best {name}", figure(row.best), f"{row.split} step {nth(row.best_step)}".strip())]


def _final_loss(steps: Steps, *, goes_on: bool) -> list[Card]:
    """Return the mean of the last twentieth of the losses."""
    tail = late(steps.line("loss", "loss").values)
    note = f"mean of the last {len(tail)}" if len(tail) > 1 else "last step"
    return [Card("Loss" if goes_on else "Final loss", figure(sum(tail) / len(tail)), note)] if tail else []


def late(losses: Sequence[float]) -> Sequence[float]:
    """Return the last twentieth of the losses."""
    return losses[-max(1, len(losses) // 20) :]
