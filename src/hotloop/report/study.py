"""A search's document as a reader sees it: the best trial, what mattered, and every trial with its cause."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop import record
from hotloop.report.text import count, figure, line, mapping, moment, number, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hotloop.report.charts import Chart
    from hotloop.report.occurrences import Tone

DOCUMENT = "study.json"
SCHEMA = record.Schema("document of a search", DOCUMENT, 1, lists=("trials",))
ROWS = 2000
"""Trials that the page lists at most: the last."""
_TONES: dict[str, Tone] = {"complete": "good", "interrupted": "warn"}
_TONES |= {"running": "note", "pruned": "note", "waiting": "note"}


@dataclasses.dataclass(frozen=True)
class TrialRow:
    """One attempt of a trial; ``cells`` are its values in the order of the search's settings."""

    number: int
    attempt: int
    state: str
    tone: Tone
    value: float | None
    cells: tuple[str, ...]
    seconds: str
    worker: str
    cause: str
    best: bool

    @classmethod
    def read(cls, attempt: Mapping[str, Any], names: Iterable[str], *, best: bool) -> TrialRow:
        """Return the row of one attempt; ``names`` are the settings of the search."""
        state, took, values = line(attempt.get("state"), 40), number(attempt.get("seconds")), _values(attempt)
        return cls(
            number=int(number(attempt.get("number")) or 0),
            attempt=int(number(attempt.get("attempt")) or 1),
            state=state,
            tone=_TONES.get(state, "bad"),
            value=number(attempt.get("value")),
            cells=tuple(_cell(values.get(name)) for name in names),
            seconds="" if took is None else seconds(took),
            worker=line(attempt.get("worker") or "", 80),
            cause=line(attempt.get("cause") or "", 1000),
            best=best,
        )


@dataclasses.dataclass(frozen=True)
class StudyView:
    """Everything that is shown of a search."""

    template: ClassVar[str] = "study.html.j2"
    charts: ClassVar[tuple[Chart, ...]] = ()

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
    trials: tuple[TrialRow, ...]
    trials_left_out: int

    def to_dict(self) -> dict[str, Any]:
        """Return the view as plain data."""
        return dataclasses.asdict(self)


def build(document: Mapping[str, Any]) -> StudyView:
    """Return what a report shows of a document; values of another type than expected are left out."""
    left, maximize = number(document.get("left")) or 0, document.get("direction") != "minimize"
    attempts = [attempt for attempt in document["trials"] if isinstance(attempt, Mapping)]
    complete = [one for one in attempts if one.get("state") == "complete" and number(one.get("value")) is not None]
    complete.sort(key=lambda one: float(one["value"]), reverse=maximize)
    best = next((one for one in complete if one.get("number") == document.get("best")), None)
    shown = attempts[-ROWS:]
    space = list(mapping(document.get("space")))
    return StudyView(
        title=f"Search {line(document.get('name'), 80)}",
        status="open" if left else "finished",
        tone="note" if left else "good",
        sentence=_sentence(document, attempts, int(left)),
        facts=tuple(_facts(document)),
        metric=line(document.get("metric"), 60),
        maximize=maximize,
        best=tuple((line(key, 80), _cell(value)) for key, value in _values(best or {}).items()),
        best_value=number(best["value"]) if best else None,
        importances=_importances(document),
        names=tuple(line(name, 80) for name in space),
        trials=tuple(TrialRow.read(one, space, best=one is best) for one in shown),
        trials_left_out=len(attempts) - len(shown),
    )


def counts_of(attempts: Iterable[Mapping[str, Any]]) -> str:
    """Say how many trials are in each state; a trial of several attempts is in that of the last one."""
    states = list({attempt.get("number"): line(attempt.get("state"), 40) for attempt in attempts}.values())
    return ", ".join(f"{states.count(state):,} {state}" for state in dict.fromkeys(states))


def _sentence(document: Mapping[str, Any], attempts: list[Mapping[str, Any]], left: int) -> str:
    """Say how many trials there are in each state, and how many are left."""
    wanted = int(number(document.get("n_trials")) or 0)
    rest = f"; {count(left, 'trial')} left" if left else ""
    return f"{count(wanted, 'trial')}: {counts_of(attempts) or 'none is over yet'}{rest}."


def _facts(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the search chooses trials and where it is kept."""
    yield f"{line(document.get('direction'), 20)} {line(document.get('metric'), 60)}"
    yield f"sampler {line(document.get('sampler'), 40)}, pruner {line(document.get('pruner'), 40)}"
    yield f"kept in {line(document.get('storage'), 200)}"
    changed = mapping(document.get("trial_settings"))
    if changed:
        shown = (f"{line(key, 80)}={'null' if value is None else line(value, 80)}" for key, value in changed.items())
        yield f"in trials alone: {', '.join(shown)}"
    if written := moment(document.get("written")):
        yield f"as of {written}"


def _importances(document: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    """Return the share of the variance that each setting explains, the largest first."""
    known = ((line(key, 80), number(value)) for key, value in mapping(document.get("importances")).items())
    shares = [(key, share) for key, share in known if share is not None]
    return tuple(sorted(shares, key=lambda item: -item[1]))


def _cell(value: Any) -> str:
    known = number(value)
    return line(value, 60) if known is None else figure(known)


def _values(attempt: Mapping[str, Any]) -> Mapping[str, Any]:
    return mapping(attempt.get("values"))
