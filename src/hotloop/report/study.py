"""A search's document as a reader sees it: the history, what mattered, slices, and every trial with its cause."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop import record
from hotloop.report import parallel
from hotloop.report.charts import LINES_PER_CHART, Chart
from hotloop.report.series import Line
from hotloop.report.text import count, figure, line, moment, number, seconds, text, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from hotloop.report.occurrences import Tone

DOCUMENT = "study.json"
SCHEMA = record.Schema("document of a search", DOCUMENT, 1, lists=("trials",))
ROWS = 2000
"""Trials that the page lists at most: the best and the last."""


@dataclasses.dataclass(frozen=True)
class TrialRow:
    """One attempt of a trial."""

    number: int
    attempt: int
    state: str
    tone: Tone
    value: float | None
    cells: tuple[str, ...]
    reports: int
    seconds: str
    worker: str
    cause: str
    best: bool

    @classmethod
    def read(cls, attempt: Mapping[str, Any], names: tuple[str, ...], *, best: bool) -> TrialRow:
        """Return the row of one attempt; ``names`` are the settings of the search."""
        state, took = line(attempt.get("state"), 40), number(attempt.get("seconds"))
        tones: dict[str, Tone] = {"complete": "good", "interrupted": "warn"}
        tones |= dict.fromkeys(("running", "pruned", "waiting"), "note")
        reports, values = attempt.get("reports"), _values(attempt)
        return cls(
            number=int(number(attempt.get("number")) or 0),
            attempt=int(number(attempt.get("attempt")) or 1),
            state=state,
            tone=tones.get(state, "bad"),
            value=number(attempt.get("value")),
            cells=tuple(_cell(values.get(name), 60) for name in names),
            reports=len(reports) if isinstance(reports, list) else 0,
            seconds="" if took is None else seconds(took),
            worker=line(attempt.get("worker") or "", 80),
            cause=line(attempt.get("cause") or "", 1000),
            best=best,
        )


@dataclasses.dataclass(frozen=True)
class ChoiceRow:
    """One choice of a setting: how many complete trials had it, and their best and median value."""

    choice: str
    trials: int
    best: float
    median: float


@dataclasses.dataclass(frozen=True)
class Choices:
    """A setting with a few choices, as a table."""

    name: str
    rows: tuple[ChoiceRow, ...]


@dataclasses.dataclass(frozen=True)
class StudyView:
    """Everything that is shown of a search."""

    template: ClassVar[str] = "study.html.j2"

    title: str
    status: str
    tone: Tone
    sentence: str
    facts: tuple[str, ...]
    metric: str
    maximize: bool
    best: tuple[tuple[str, str], ...]
    best_value: float | None
    importances: tuple[tuple[str, float], ...]
    names: tuple[str, ...]
    charts: tuple[Chart, ...]
    choices: tuple[Choices, ...]
    parallel: parallel.Parallel | None
    trials: tuple[TrialRow, ...]
    trials_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain data without what only the page draws."""
        plain = dataclasses.asdict(dataclasses.replace(self, charts=(), parallel=None))
        del plain["charts"], plain["parallel"]
        return plain


def build(document: Mapping[str, Any]) -> StudyView:
    """Return what a report shows of a document; values of another type than expected are left out."""
    search = _Search(document)
    left, best, shown = number(document.get("left")) or 0, search.best, search.shown()
    return StudyView(
        title=f"Search {line(document.get('name'), 80)}",
        status="open" if left else "finished",
        tone="note" if left else "good",
        sentence=search.sentence(int(left)),
        facts=tuple(search.facts()),
        metric=search.metric,
        maximize=search.maximize,
        best=tuple((line(key, 80), _cell(value, 80)) for key, value in _values(best or {}).items()),
        best_value=number(best["value"]) if best else None,
        importances=search.importances(),
        names=tuple(line(name, 80) for name in search.space),
        charts=tuple(search.charts()),
        choices=tuple(search.choices()),
        parallel=search.parallel(),
        trials=tuple(TrialRow.read(attempt, tuple(search.space), best=attempt is best) for attempt in shown),
        trials_left_out=len(search.attempts) - len(shown),
    )


def counts_of(attempts: Iterable[Mapping[str, Any]]) -> str:
    """Say how many trials are in each state; a trial of several attempts is in that of the last one."""
    states = list({attempt.get("number"): line(attempt.get("state"), 40) for attempt in attempts}.values())
    return ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))


class _Search:
    """The document of a search, read into the parts of its view."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document
        space = document.get("space")
        self.space: Mapping[str, Any] = space if isinstance(space, Mapping) else {}
        self.metric = line(document.get("metric"), 60)
        self.maximize = document.get("direction") != "minimize"
        self.better: Callable[[list[float]], float] = max if self.maximize else min
        self.attempts = [attempt for attempt in document["trials"] if isinstance(attempt, Mapping)]
        complete = (attempt for attempt in self.attempts if attempt.get("state") == "complete")
        self.complete = [attempt for attempt in complete if number(attempt.get("value")) is not None]
        self.ordered = sorted(self.complete, key=lambda attempt: float(attempt["value"]), reverse=self.maximize)
        self.best = next((attempt for attempt in self.ordered if attempt.get("number") == document.get("best")), None)

    def shown(self) -> list[Mapping[str, Any]]:
        """Return the attempts to list: all, or the best and the last if they are too many for a page."""
        if len(self.attempts) <= ROWS:
            return self.attempts
        kept = {id(attempt) for attempt in [*self.ordered[: ROWS // 2], *self.attempts[-ROWS // 2 :]]}
        return [attempt for attempt in self.attempts if id(attempt) in kept]

    def sentence(self, left: int) -> str:
        """Say how many trials there are in each state, and how many are left."""
        counts = counts_of(self.attempts)
        wanted = number(self.document.get("n_trials")) or 0
        rest = f"; {count(left, 'trial')} left" if left else ""
        return f"{count(int(wanted), 'trial')}: {counts or 'none is over yet'}{rest}."

    def facts(self) -> Iterator[str]:
        """Yield how the search chooses trials and where it is kept."""
        document = self.document
        yield f"{line(document.get('direction'), 20)} {self.metric}"
        yield from self.front()
        yield f"sampler {line(document.get('sampler'), 40)}, pruner {line(document.get('pruner'), 40)}"
        yield f"kept in {line(document.get('storage'), 200)}"
        changed = document.get("trial_settings")
        if isinstance(changed, Mapping) and changed:
            values = {key: "null" if value is None else line(value, 80) for key, value in changed.items()}
            yield "in trials alone: " + ", ".join(f"{line(key, 80)}={value}" for key, value in values.items())
        if written := moment(document.get("written")):
            yield f"as of {written}"

    def front(self) -> Iterator[str]:
        """Yield the trials that no other trial beats in every metric, where there are several metrics."""
        numbers, also = (self.document.get(name) for name in ("front", "also"))
        if not isinstance(numbers, list) or not isinstance(also, list) or not also:
            return
        yield f"and {', '.join(line(metric, 60) for metric in also)}; no other trial beats these in all of them:"
        for attempt in self.complete:
            further = attempt.get("also")
            if attempt.get("number") in numbers and isinstance(further, list):
                values = [attempt["value"], *further]
                names = [self.metric, *(line(metric, 60).partition(":")[2] for metric in also)]
                shown = ", ".join(
                    f"{name} {figure(number(value) or 0.0)}" for name, value in zip(names, values, strict=False)
                )
                yield f"trial {attempt['number']}: {shown}"

    def importances(self) -> tuple[tuple[str, float], ...]:
        """Return the share of the variance that each setting explains, the largest first."""
        given = self.document.get("importances")
        known = [(line(key, 80), number(value)) for key, value in given.items()] if isinstance(given, Mapping) else []
        shares = [(key, share) for key, share in known if share is not None]
        return tuple(sorted(shares, key=lambda item: -item[1]))

    def charts(self) -> Iterator[Chart]:
        """Yield the history, and a slice for each of the first 24 settings that is a number of a range."""
        if not self.complete:
            return
        points = [(float(number(attempt.get("number")) or 0), float(attempt["value"])) for attempt in self.complete]
        values = Line.of(self.metric, points)
        so_far: list[float] = []
        for value in values.values:
            so_far.append(self.better([*so_far[-1:], value]))
        best = Line("best so far", values.steps, tuple(so_far))
        yield self.chart("history", "History", [values, best], "trial", wide=True)
        if curves := self.curves():
            styles = ["line"] * len(curves)
            yield Chart.of(
                "reports",
                f"{words(self.metric)} as the best trials went",
                curves,
                styles,
                apart=True,
                wide=True,
                axis="report",
            )
        for place, (name, about) in enumerate(list(self.space.items())[:24]):
            if not isinstance(about, Mapping) or about.get("kind") == "choices":
                continue
            pairs = ((number(_values(attempt).get(name)), float(attempt["value"])) for attempt in self.complete)
            slice_ = Line.of(self.metric, [(at, value) for at, value in pairs if at is not None])
            if slice_:
                log = about.get("kind") == "log" and slice_.steps[0] > 0
                yield self.chart(f"slice-{place}", line(name, 80), [slice_], line(name, 80), axis_log=log)

    def curves(self) -> list[Line]:
        """Return what the best trials reported while they trained; a line for each."""
        found = []
        for attempt in self.ordered[:LINES_PER_CHART]:
            reports = attempt.get("reports")
            pairs = [one for one in reports if _is_pair(one)] if isinstance(reports, list) else []
            known = ((at, number(value)) for step, value in pairs if (at := number(step)) is not None)
            found.append(Line.of(f"trial {line(attempt.get('number'), 20)}", known))
        return [one for one in found if len(one.values) > 1]

    def parallel(self) -> parallel.Parallel | None:
        """Return all settings of the best trials side by side."""
        important = [name for name, _ in self.importances() if name in self.space]
        names = list(dict.fromkeys([*important, *self.space]))
        return parallel.build(self.ordered, self.space, names, self.metric)

    def chart(self, key: str, title: str, lines: list[Line], axis: str, **fields: Any) -> Chart:
        """Return a chart of trials: dots for their values, and a line for the best so far."""
        values = lines[0].values
        low, high = figure(min(values)), figure(max(values))
        summary = f"{self.metric} of {count(len(values), 'trial')}, from {low} to {high}"
        styles = ["points", "line"][: len(lines)]
        return Chart.of(key, title, lines, styles, summary=summary, apart=True, axis=axis, **fields)

    def choices(self) -> Iterator[Choices]:
        """Yield a table for each setting with a few choices, the best median first."""
        for name, about in self.space.items():
            if not isinstance(about, Mapping) or about.get("kind") != "choices":
                continue
            by_choice: dict[str, list[float]] = {}
            for attempt in self.complete:
                if name in _values(attempt):
                    by_choice.setdefault(text(_values(attempt)[name]), []).append(float(attempt["value"]))
            rows = [
                ChoiceRow(line(choice, 80), len(values), self.better(values), statistics.median(values))
                for choice, values in by_choice.items()
            ]
            if rows:
                rows.sort(key=lambda row: row.median, reverse=self.maximize)
                yield Choices(line(name, 80), tuple(rows))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2  # noqa: PLR2004 - a step, and what was reported there


def _cell(value: Any, limit: int) -> str:
    """Return a setting as a table shows it: numbers with the digits that a person compares."""
    known = number(value)
    return line(value, limit) if known is None else figure(known)


def _values(attempt: Mapping[str, Any]) -> Mapping[str, Any]:
    values = attempt.get("values")
    return values if isinstance(values, Mapping) else {}
