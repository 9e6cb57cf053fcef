"""The top of a report: what ran and how it ended in a sentence or two, and the numbers that matter most."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.report.series import Line, Steps, steady
from hotloop.report.text import count, figure, flat, line, moment, nth, number, quantity, seconds, short_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.report.charts import MetricRow
    from hotloop.report.components import Component
    from hotloop.report.occurrences import Tone

TITLES = ("run_name", "run.name", "name", "recipe", "recipe.name")
"""Settings that name a run, the first one that is set."""
_METRICS = ("f1", "auc", "auroc", "accuracy")
"""Metrics in the order in which the first that was recorded becomes the headline's."""
_MEASURED = (
    ("speed_up", "Speed-up", "over eager steps"),
    ("seconds_saved", "Saved", "before the cost of preparing"),
    ("samples_per_second", "Throughput", "samples, steady"),
    ("peak_memory_bytes", "Peak memory", "of the whole run"),
)
_NAMED = 3
"""Components that the verdict names one by one."""
CARDS = 7
"""As many as stand in one row."""
_ABBREVIATED = {"f1", "auc", "auroc"}


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


@dataclasses.dataclass(frozen=True)
class Note:
    """Something about the run that a reader must not miss."""

    tone: Tone
    text: str


@dataclasses.dataclass(frozen=True)
class Card:
    """One of the headline's numbers, with what it is and how it was come by."""

    label: str
    value: str
    note: str = ""


def headline(document: Mapping[str, Any], steps: Steps, parts: Sequence[Component], *, killed: bool) -> Headline:
    """Say what ran, how it ended and whether it ran as asked."""
    status = line(document.get("status"), 40)
    label = "interrupted (killed)" if killed else status
    tones: dict[str, Tone] = {"finished": "good", "running": "note", "interrupted": "warn", "pruned": "note"}
    return Headline(
        title=_title(document),
        status=label,
        tone="warn" if killed else tones.get(status, "bad"),
        when=moment(document.get("created")),
        sentence=_sentence(document, steps, label),
        verdict=_verdict(parts),
        notes=tuple(_notes(document, steps)),
    )


def cards(measured: Mapping[str, Any], steps: Steps, times: Line, metrics: Sequence[MetricRow]) -> list[Card]:
    """Choose the headline's numbers; each says where it is from, and what is not known is left out."""
    found = [_steady(measured, times), _cold(measured, times)]
    found += [_measured(measured, *each) for each in _MEASURED]
    found += [
        _metric(metrics),
        _loss(steps),
        _measured(measured, "compile_seconds", "Compile time", "all compiles together"),
    ]
    return [card for card in found if card is not None][:CARDS]


def _measured(measured: Mapping[str, Any], key: str, label: str, note: str) -> Card | None:
    known = number(measured.get(key)) is not None
    return Card(label, _compact(quantity(key, measured[key])), note) if known else None


def _compact(shown: str) -> str:
    """Shorten minutes, so that a duration fits a card in one line."""
    return shown.replace(" min", " m")


def _title(document: Mapping[str, Any]) -> str:
    settings = dict(flat(document["settings"]))
    named = next((settings[key] for key in TITLES if isinstance(settings.get(key), str) and settings[key]), None)
    return line(named, 120) if named else "Training run"


def _sentence(document: Mapping[str, Any], steps: Steps, status: str) -> str:
    begun, ended = number(document.get("created")), number(document.get("finished") or document.get("updated"))
    ran = -1.0 if begun is None or ended is None else ended - begun - (number(document.get("idle_seconds")) or 0.0)
    took = f" in {seconds(ran)}" if steps.entries and ran >= 0 else ""
    # A hot loop does not write every step down, and says how many it did.
    measured = document.get("measurements")
    told = number(measured.get("steps_done")) if isinstance(measured, Mapping) else None
    done = int(told) if told else len(steps.entries)
    many = count(done, "step") if done else "no step"
    said = f"{status[:1].upper()}{status[1:]}: {many}{took}"
    sittings = number(document.get("starts")) or 0
    if sittings > 1:
        said += f", in {int(sittings)} sittings"
    return said + "."


def _verdict(parts: Sequence[Component]) -> str:
    """Say whether what was asked for is what ran."""
    if not parts:
        return "The record names no component, so it cannot say what ran compiled."
    if len(parts) > _NAMED and all(part.as_asked for part in parts):
        eager = sum(part.state == "eager" for part in parts)
        how = {0: "compiled", len(parts): "eager"}.get(eager, f"{len(parts) - eager} compiled and {eager} eager")
        return f"All {len(parts)} components ran as asked, {how}."
    order = sorted(parts, key=lambda part: part.as_asked)
    said = [f"{part.name} {part.sentence}{_because(part)}" for part in order[:_NAMED]]
    if len(order) > len(said):
        said.append(f"{len(order) - len(said)} more below")
    return "; ".join(said) + "."


def _because(part: Component) -> str:
    if part.as_asked or not part.causes:
        return ""
    cause = part.causes[0]
    where = f" ({short_place(cause.where)})" if cause.where else ""
    return f": {line(cause.reason, 160).rstrip('.')}{where}"


def _notes(document: Mapping[str, Any], steps: Steps) -> list[Note]:
    notes = []
    if document.get("error") and document.get("status") != "interrupted":
        tone: Tone = "note" if document.get("status") == "pruned" else "bad"
        notes.append(Note(tone, line(document["error"], 1000)))
    wrong = steps.not_finite("loss")
    if wrong:
        said = f"The loss was not finite in {count(len(wrong), 'step')}, first in step {nth(wrong[0])}."
        notes.append(Note("warn", said))
    unread = number(document.get("unread_lines"))
    if unread:
        said = f"{count(int(unread), 'line')} of the record could not be read (a kill tears the last one)."
        notes.append(Note("warn", said))
    return notes


def _steady(measured: Mapping[str, Any], times: Line) -> Card | None:
    if number(measured.get("steady_step_ms")) is not None:
        return Card("Steady step", quantity("steady_step_ms", measured["steady_step_ms"]), "measured")
    usual = steady(times)
    return None if usual is None else Card("Steady step", seconds(usual), "median of the later half")


def _cold(measured: Mapping[str, Any], times: Line) -> Card | None:
    if number(measured.get("cold_seconds")) is not None:
        return Card(
            "Cold time", _compact(quantity("cold_seconds", measured["cold_seconds"])), "first steps and compiles"
        )
    return Card("First step", _compact(seconds(times.values[0])), "compiles included") if times else None


def _metric(metrics: Sequence[MetricRow]) -> Card | None:
    usable = [row for row in metrics if "train" not in row.split.lower()]
    for wanted in _METRICS:
        row = next((row for row in usable if row.name.lower() == wanted), None)
        if row is not None:
            name = f"Best {row.name.upper() if row.name in _ABBREVIATED else row.name}"
            return Card(name, figure(row.best), f"{row.split} step {nth(row.best_step)}".strip())
    return None


def _loss(steps: Steps) -> Card | None:
    loss = steps.line("loss", "loss")
    if not loss:
        return None
    tail = loss.values[-max(1, len(loss.values) // 20) :]
    note = f"mean of the last {len(tail)}" if len(tail) > 1 else "last step"
    return Card("Final loss", figure(sum(tail) / len(tail)), note)
