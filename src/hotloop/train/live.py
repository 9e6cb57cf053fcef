"""A study as people watch it: its trials, the best so far, what each worker runs, how fast, and how long it will take.

`Progress` is plain data, fed by events in any order of workers; `View` shows it: live in a terminal, as plain lines
elsewhere. What the events hold is text of the user's (names, causes), so nothing of it is read as markup.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STATES = ("complete", "pruned", "failed", "interrupted")
"""How a trial ends."""
RECENT = 8
"""Trials that are over and still shown."""


@dataclasses.dataclass
class Trial:
    """A trial as far as it is known: the last intermediate value while it runs, its own once it is complete."""

    number: int
    values: Mapping[str, Any]
    worker: int
    began: float
    attempt: int = 1
    state: str = "running"
    reports: int = 0
    value: float | None = None
    seconds: float = 0.0
    cause: str = ""


class Progress:
    """Where a study is.

    Args:
        name: of the study.
        metric: the objective's name.
        total: trials in all, those that are over included.
        workers: how many run trials at the same time.
        maximize: whether more of the metric is better.
        clock: gives seconds that never go back.
    """

    def __init__(  # noqa: PLR0913 - what a study is
        self, name: str, metric: str, total: int, workers: int, *, maximize: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.name, self.metric, self.total, self.workers, self.maximize = name, metric, total, workers, maximize
        self._clock = clock
        self.trials: dict[int, Trial] = {}
        self.earlier = 0
        """Trials that an earlier command finished, of which no event came."""
        self.earlier_best: Trial | None = None

    def began(self, number: int, worker: int, values: Mapping[str, Any], attempt: int = 1) -> None:
        """Note that a worker took a trial; a second attempt takes the place of the first.

        A worker has one trial at a time: what else runs under its number is of one that died and was replaced.
        """
        for one in self.running:
            if one.worker == worker:
                one.state = "interrupted"
        self.trials[number] = Trial(number, dict(values), worker, self._clock(), attempt)

    def reported(self, number: int, value: float) -> None:
        """Note an intermediate value."""
        if (trial := self.trials.get(number)) is not None:
            trial.reports, trial.value = trial.reports + 1, value

    def ended(self, number: int, state: str, value: float | None, cause: str = "") -> None:
        """Note how a trial ended."""
        if (trial := self.trials.get(number)) is not None:
            trial.state, trial.cause, trial.seconds = state, cause, self._clock() - trial.began
            trial.value = value if value is not None else trial.value

    def hear(self, event: Mapping[str, Any]) -> None:
        """Record an event of a search as plain data: its ``kind`` and fields; other kinds say nothing here."""
        kind = event.get("kind")
        if kind == "SearchBegan":
            self.total, self.earlier = event["total"], event["over"]
            if best := event.get("best"):
                self.earlier_best = Trial(
                    best["number"], best["values"], 0, self._clock(), state="complete", value=best["value"]
                )
        elif kind == "TrialBegan":
            self.began(event["number"], event["worker"], event["values"], event.get("attempt", 1))
        elif kind == "TrialReported":
            self.reported(event["number"], event["value"])
        elif kind == "TrialEnded":
            self.ended(event["number"], event["state"], event["value"], event.get("cause", ""))

    @property
    def running(self) -> list[Trial]:
        """What each worker runs, by worker."""
        return sorted((one for one in self.trials.values() if one.state == "running"), key=lambda one: one.worker)

    @property
    def over(self) -> list[Trial]:
        """The trials that are over, in the order of their numbers; an interrupted one is open again."""
        return [one for _, one in sorted(self.trials.items()) if one.state not in ("running", "interrupted")]

    @property
    def done(self) -> int:
        """How many trials are over."""
        return self.earlier + len(self.over)

    @property
    def best(self) -> Trial | None:
        """The best complete trial, of this command or of an earlier one."""
        known = [self.earlier_best, *self.over] if self.earlier_best else self.over
        complete = [one for one in known if one.state == "complete" and one.value is not None]
        choose = max if self.maximize else min
        return choose(complete, key=lambda one: one.value or 0.0, default=None)

    @property
    def trials_per_hour(self) -> float | None:
        """How many trials an hour end, by the median trial and the workers; None before one has ended."""
        if not self.over:
            return None
        usual = statistics.median(one.seconds for one in self.over)
        return 3600 * self.workers / max(usual, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """How long the trials that are left will take; None before one has ended."""
        rate = self.trials_per_hour
        if rate is None:
            return None
        now = self._clock()
        usual = 3600 * self.workers / rate
        ahead = sum(min(now - one.began, usual) for one in self.running)
        return max(0.0, usual * (self.total - self.done) - ahead) / self.workers

    def seconds_of(self, trial: Trial) -> float:
        """Return how long a trial took, or has run so far."""
        return self._clock() - trial.began if trial.state == "running" else trial.seconds

    def counts(self) -> str:
        """Say how the trials ended: ``12 complete, 3 pruned``; of an earlier command's, how many there are."""
        many = {state: sum(one.state == state for one in self.over) for state in STATES}
        parts = {"earlier": self.earlier, **many}
        return ", ".join(f"{number} {state}" for state, number in parts.items() if number) or "none over"

    def headline(self) -> str:
        """Say in a line how far the study is."""
        rate, left = self.trials_per_hour, self.seconds_left
        speed = f"; {rate:.0f} trials an hour, {duration(left or 0.0)} left" if rate is not None else ""
        return f"{self.name}: {self.done} of {self.total} trials over ({self.counts()}){speed}"

    def best_line(self) -> str:
        """Say what is best so far; empty while nothing is."""
        best = self.best
        if best is None or best.value is None:
            return ""
        return f"best {self.metric} {best.value:.4f} in trial {best.number}: {values_line(best.values)}"


class View:
    """Shows a study's progress. As a context manager it is live, where the console is a terminal.

    Args:
        progress: the study's.
        console: where to; by default standard error, since results go to standard output.
    """

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress = progress
        self.console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None

    def say(self, line: str) -> None:
        """Print a line as it stands, above what is live."""
        self.console.print(Text(line), soft_wrap=True)

    def hear(self, event: Mapping[str, Any], line: str = "") -> None:
        """Show an event; without a terminal as its line, and how far the study is once a trial is over."""
        self.progress.hear(event)
        if self._live is not None:
            if event.get("kind") == "Said":
                self.say(line)
            self._live.refresh()
            return
        if line:
            self.say(line)
        if event.get("kind") == "TrialEnded":
            self.say(self.progress.headline())

    def __rich__(self) -> Group:
        parts: list[Any] = [Text(self.progress.headline(), style="bold")]
        if best := self.progress.best_line():
            parts.append(Text(best, style="green"))
        return Group(*parts, self._table())

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("trial", "worker", "state", self.progress.metric, "time"):
            table.add_column(Text(title), justify="left" if title == "state" else "right", no_wrap=True)
        table.add_column(Text("settings"), overflow="ellipsis", no_wrap=True)
        for one in [*self.progress.over[-RECENT:], *self.progress.running]:
            table.add_row(*map(Text, self._cells(one)))
        return table

    def _cells(self, one: Trial) -> tuple[str, ...]:
        seconds = self.progress.seconds_of(one)
        again = " (again)" if one.attempt > 1 else ""
        value = "" if one.value is None else f"{one.value:.4f}"
        shown = one.cause if one.state == "failed" else values_line(one.values)
        return (str(one.number), str(one.worker), one.state + again, value, duration(seconds), shown)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def values_line(values: Mapping[str, Any]) -> str:
    """Return a trial's settings in a line, each by the end of its name."""
    return "  ".join(
        f"{name.rsplit('.', 1)[-1]} {f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in values.items()
    )


def duration(seconds: float) -> str:
    """Say how long: ``42 s``, ``7 min``, ``3 h 05 min``."""
    if seconds < 100:  # noqa: PLR2004 - as people say it
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004
