"""The top of a report: what ran and how it ended in a sentence or two, and the most important numbers."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.report.series import ENOUGH, median_interval
from hotloop.report.text import count, figure, flat, line, moment, nth, number, quantity, seconds, short_place

if TYPE_CHECKING:
    from hotloop.report.charts import MetricRow
    from hotloop.report.components import Component
    from hotloop.report.occurrences import Tone
    from hotloop.report.series import Line, Steps

KILLED, THERE = "interrupted (killed)", "running on a cluster"
"""Of a record that says that it runs: its process is gone, or was not of this machine when the record was fetched."""


def standing(document: Mapping[str, Any]) -> str:
    """Return how a run or a cross-validation is doing, in words."""
    if record.was_killed(document):
        return KILLED
    status = line(document.get("status"), 40)
    return THERE if status == "running" and record.on_cluster(document) else status


def ended_short(document: Mapping[str, Any], done: int) -> str:
    """Say that a run ended in order before the step that it was told to be its last; empty where it did not."""
    planned = number(document["settings"].get("total_steps"))
    if document.get("status") != "finished" or planned is None or done >= planned:
        return ""
    return f"ended at step {done:,} of {int(planned):,}"


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
        status, label = line(document.get("status"), 40), standing(document)
        tones: dict[str, Tone] = {"finished": "good", "running": "note", "interrupted": "warn", "pruned": "note"}
        settings = dict(flat(document["settings"]))
        titles = (settings.get(key) for key in ("run_name", "run.name", "name", "recipe", "recipe.name"))
        title = next((title for title in titles if title and isinstance(title, str)), None)
        return cls(
            title=line(title, 120) if title else "Training run",
            status=label,
            tone="warn" if label == KILLED else tones.get(status, "bad"),
            when=moment(document.get("created")),
            sentence=cls._sentence(document, steps, label),
            verdict=cls._verdict(parts),
            notes=tuple(cls._notes(document, steps)),
        )

    @staticmethod
    def _sentence(document: Mapping[str, Any], steps: Steps, status: str) -> str:
        begun, ended = number(document.get("created")), number(document.get("finished") or document.get("updated"))
        ran = -1.0 if begun is None or ended is None else ended - begun - (number(document.get("idle_seconds")) or 0.0)
        took = f" in {seconds(ran)}" if steps.entries and ran >= 0 else ""
        # A hot loop does not record every step, but it records how many it did, unless it was killed.
        measured = document.get("measurements")
        counted = number(measured.get("steps_done")) if isinstance(measured, Mapping) else None
        last = number(steps.entries[-1].get("step")) if steps.entries else None
        done = int(counted or max(last or 0, len(steps.entries)))
        sittings = number(document.get("starts")) or 0
        starts = f", in {int(sittings)} sittings" if sittings > 1 else ""
        if short := ended_short(document, done):
            return f"{short[:1].upper()}{short[1:]}{took}{starts}."
        return f"{status[:1].upper()}{status[1:]}: {count(done, 'step') if done else 'no step'}{took}{starts}."

    @staticmethod
    def _verdict(parts: Sequence[Component], named: int = 3) -> str:
        """Say whether what was asked for is what ran; at most ``named`` components are named one by one."""
        if not parts:
            return "The record names no component, so it cannot say what ran compiled."
        if len(parts) > named and all(part.as_asked for part in parts):
            eager = sum(part.state == "eager" for part in parts)
            how = {0: "compiled", len(parts): "eager"}.get(eager, f"{len(parts) - eager} compiled and {eager} eager")
            return f"All {len(parts)} components ran as asked, {how}."
        phrases = []
        for part in sorted(parts, key=lambda part: part.as_asked)[:named]:
            because = ""
            if part.causes and not part.as_asked:
                cause = part.causes[0]
                where = f" ({short_place(cause.where)})" if cause.where else ""
                because = f": {line(cause.reason, 160).rstrip('.')}{where}"
            phrases.append(f"{part.name} {part.sentence}{because}")
        if len(parts) > named:
            phrases.append(f"{len(parts) - named} more below")
        return "; ".join(phrases) + "."

    @staticmethod
    def _notes(document: Mapping[str, Any], steps: Steps) -> list[Note]:
        notes = []
        if document.get("error") and document.get("status") != "interrupted":
            notes.append(Note("note" if document.get("status") == "pruned" else "bad", line(document["error"], 1000)))
        wrong = steps.not_finite("loss")
        if wrong:
            where = f"{count(len(wrong), 'step')}, first in step {nth(wrong[0])}"
            notes.append(Note("warn", f"The loss was not finite in {where}."))
        cuts = document.get("cuts")
        for cut in cuts if isinstance(cuts, list) else ():
            steps_cut = number(cut.get("steps")) if isinstance(cut, Mapping) else None
            if steps_cut:
                again = f"{count(int(steps_cut), 'step')} that an earlier start did after it are left out here"
                notes.append(Note("note", f"Resumed at step {line(cut.get('step'), 20)}: {again}."))
        unread = number(document.get("unread_lines"))
        if unread:
            lines = count(int(unread), "line")
            notes.append(Note("warn", f"{lines} of the record could not be read (a kill tears the last one)."))
        return notes


TOO_FEW_EAGER = "too few eager steps to tell"
UNEVEN_EAGER = "eager steps too uneven to tell"


def _times(value: float) -> str:
    return quantity("speed_up", value)


@dataclasses.dataclass(frozen=True)
class Card:
    """One of the headline's numbers, with its name and its source."""

    label: str
    value: str
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Cards:
    """The most important numbers of a run, from its measurements, its steps and their seconds, and its metrics."""

    measured: Mapping[str, Any]
    steps: Steps
    times: Line
    metrics: Sequence[MetricRow]
    goes_on: bool = False

    def all(self, most: int = 7) -> list[Card]:
        """Return the cards that are known; a measured number goes before an estimate."""
        cold = self.measurement("cold_seconds", "Cold time", "first steps and compiles")
        if not cold and self.times:
            cold = [Card("First step", seconds(self.times.values[0]), "compiles included")]
        steady = self.measurement("steady_step_ms", "Steady step", "measured")
        if not steady and self.times.steady is not None:
            steady = [Card("Steady step", seconds(self.times.steady), "median of the later half")]
        cards = [
            *steady,
            *cold,
            *self.speed_up(),
            *self.measurement("seconds_saved", "Saved", "before the cost of preparing"),
            *self.measurement("samples_per_second", "Throughput", "samples, steady"),
            *self.measurement("peak_memory_bytes", "Peak memory", "of the whole run"),
            *self.best_metric(),
            *self.final_loss(),
            *self.measurement("compile_seconds", "Compile time", "all compiles together"),
        ]
        # With minutes shortened, a duration fits a card in one line.
        return [dataclasses.replace(card, value=card.value.replace(" min", " m")) for card in cards[:most]]

    def measurement(self, key: str, label: str, note: str) -> list[Card]:
        """Return the card of one measurement."""
        known = number(self.measured.get(key)) is not None
        return [Card(label, quantity(key, self.measured[key]), note)] if known else []

    def speed_up(self) -> list[Card]:
        """Return the card of the speed-up with its interval, or with why the eager steps tell none."""
        known = self.measurement("speed_up", "Speed-up", "over eager steps")
        if known and self.no_speed_up:
            return [Card("Speed-up", "\N{EN DASH}", self.no_speed_up)]
        if known and not self._by_auto:
            low, high = self._speed_up_interval()
            return [dataclasses.replace(known[0], note=f"over eager steps: {_times(low)} to {_times(high)}")]
        return known

    @property
    def no_speed_up(self) -> str:
        """Why no speed-up is told; empty where one is. ``auto`` times its own steps, and judges by itself."""
        if self._by_auto:
            return ""
        if len(self.steps.eager_seconds()) < ENOUGH:
            return TOO_FEW_EAGER
        low, high = self._speed_up_interval()
        return f"{UNEVEN_EAGER}: {_times(low)} to {_times(high)}" if low < 1 < high else ""

    @property
    def _by_auto(self) -> bool:
        return number(self.measured.get("eager_step_ms")) is not None

    def _speed_up_interval(self) -> tuple[float, float]:
        """Return between what the speed-up lies, since the eager steps are few. The first is left out, as it was."""
        eager = self.steps.eager_seconds()[1:]
        usual, gain = statistics.median(eager), number(self.measured.get("speed_up")) or 0.0
        low, high = median_interval(eager)
        return (gain * low / usual, gain * high / usual) if usual > 0 else (gain, gain)

    def best_metric(self) -> list[Card]:
        """Return the first of the usual metrics that was recorded outside of training."""
        rows = [row for row in self.metrics if "train" not in row.split.lower()]
        for wanted in ("f1", "auc", "auroc", "accuracy"):
            for row in rows:
                if row.name.lower() == wanted:
                    name = row.name.upper() if row.name in ("f1", "auc", "auroc") else row.name
                    return [Card(f"Best {name}", figure(row.best), f"{row.split} step {nth(row.best_step)}".strip())]
        return []

    def final_loss(self) -> list[Card]:
        """Return the mean of the last twentieth of the losses."""
        loss = self.steps.line("loss", "loss")
        if not loss:
            return []
        tail = loss.values[-max(1, len(loss.values) // 20) :]
        note = f"mean of the last {len(tail)}" if len(tail) > 1 else "last step"
        return [Card("Loss" if self.goes_on else "Final loss", figure(sum(tail) / len(tail)), note)]
