"""What a run prints: a live bar in a terminal, plain lines elsewhere, and the lines that people search logs for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hotloop.compiling import observe

if TYPE_CHECKING:
    from collections.abc import Mapping

PLAIN_LINES = 20
"""About how many lines of progress a run prints where there is no terminal."""


def words(running: str) -> str:
    """Say what runs: ``eager``, or the preset in force, or for how long a compile has gone on."""
    since = observe.compiling_since()
    if since is not None:
        return f"compiling {time.monotonic() - since:.0f} s"
    return "eager" if running == "none" else running


class _Running(ProgressColumn):
    """What is running. The bar's own thread asks, so that a compile's seconds go on while the step waits for it."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(words(task.fields["running"]), style="cyan")


class Display:
    """Prints a run. As a context manager it shows the bar, where the console is a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._total = 0
        self._task: Any = None
        self._every = 1
        self._shown_at: tuple[int, float] = (0, time.monotonic())

    def say(self, line: str) -> None:
        """Print a line as it stands: square brackets are no markup, and long lines are left to the terminal."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, total: int, done: int, running: str = "none") -> None:
        """Say how many steps there are, and how many of them an earlier start has done."""
        self._total, self._every = total, max(1, total // PLAIN_LINES)
        self._shown_at = (done, time.monotonic())
        if self._progress:
            self._task = self._progress.add_task(
                "train", total=total, completed=done, loss="", rate="", speed="", running=running
            )

    def running(self, running: str) -> None:
        """Say what is about to run, before it has done a step."""
        if self._progress:
            self._progress.update(self._task, running=running)

    def step(self, entry: Mapping[str, Any]) -> None:
        """Show a step that was just finished, by its entry in the record."""
        step, rate = entry["step"], f"lr {entry['learning_rate']:.2e}" if "learning_rate" in entry else "no lr"
        loss = f"loss {entry['loss']:.4f}" if "loss" in entry else "no loss"
        if self._progress:
            speed = f"{1 / max(entry['seconds'], 1e-9):.2f} steps/s"
            self._progress.update(
                self._task, completed=step, loss=loss, rate=rate, speed=speed, running=entry["running"]
            )
        elif step % self._every == 0 or step in (1, self._total):
            since, at = self._shown_at
            self._shown_at = (step, time.monotonic())
            speed = (step - since) / max(self._shown_at[1] - at, 1e-9)
            self.say(f"step {step}/{self._total}  {loss}  {rate}  {speed:.2f} steps/s  {words(entry['running'])}")

    def validated(self, step: int, metrics: Mapping[str, float], *, best: bool) -> None:
        """Show a validation."""
        self.say(f"validation at step {step}: {figures(metrics)}{' (best so far)' if best else ''}")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}  {task.fields[rate]}  {task.fields[speed]}"),
                _Running(),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None


def figures(metrics: Mapping[str, float]) -> str:
    """Return metrics as one line."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
