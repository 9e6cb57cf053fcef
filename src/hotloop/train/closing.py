"""How a run ends for its reader: the page of its record, and what to print."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hotloop import record, report
from hotloop.errors import describe
from hotloop.report.text import seconds
from hotloop.train import checkpoint
from hotloop.train.compiling import PREFIX
from hotloop.train.display import Display, figures
from hotloop.train.outcome import CHECKED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.train.outcome import Outcome
    from hotloop.train.start import Start

PAGE = "report.html"


@contextlib.contextmanager
def reported(start: Start, display: Display) -> Iterator[None]:
    """Write the report of the run when it is over, however it ends, and store the run; a dry run has nothing.

    Raises:
        TrainingFailedError: the run's storage cannot be written.
    """
    if start.dry or not start.leads:
        yield
        return
    copy = start.copy
    if copy:
        copy.push(display.say)
    try:
        with _reported(start, display):
            yield
    finally:
        if copy:
            copy.push(display.say, last=True)
    if copy and start.within.trial is None:  # the value of a trial is known, and worth no failure
        copy.close(display.say)


@contextlib.contextmanager
def _reported(start: Start, display: Display) -> Iterator[None]:
    folder = start.folder
    try:
        yield
    finally:
        try:
            page = report.write_html(record.load(folder), folder / PAGE)
            display.say(f"Report: {page}")
        except Exception as error:  # noqa: BLE001 - a page is never worth the outcome, or the failure, of the run
            display.say(f"The report cannot be written ({describe(error)}); try: hotloop report {folder}")


def tell(outcome: Outcome, display: Display) -> None:
    """Print what came of a run: its best validation, what ran, and where its checkpoints are."""
    if outcome.status == CHECKED:
        return
    if outcome.best:
        display.say(f"Best validation, at step {outcome.best_step} of {outcome.step}: {figures(outcome.best)}")
        for line in outcome.remarks:
            display.say(line)
    for name, status in outcome.components.items():
        display.say(f"Ran: {name} {_ran(status)}")
    for line in outcome.notes:
        display.say(f"{PREFIX} {line}")
    display.say(f"Trained for {seconds(outcome.seconds)}. Checkpoints: {outcome.folder / checkpoint.FOLDER}")


def _ran(status: dict[str, object]) -> str:
    running, state = status["running"], status["state"]
    return "eager" if state == "eager" else f"{running} ({state})"
