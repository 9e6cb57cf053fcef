"""How a run begins for its reader: what its record has of its settings, and of what was said before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.train import idle

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.record import RunRecord
    from hotloop.train.display import Display
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start


def begin(settings: Settings, display: Display) -> None:
    """Say, before any work, which settings do nothing."""
    for line in idle.remarks(settings):
        display.say(line)


def write(start: Start, told: Mapping[str, Sequence[str]], record: RunRecord, display: Display) -> None:
    """Write down what a run reads of its settings, which of them do nothing, and what it is about.

    What an earlier start has recorded behind the checkpoint that this one goes on from is left out, and said.

    Args:
        start: the run's settings, and its checkpoint.
        told: what the recipe has said already of the data and the like: lines by their subject.
        record: the run's.
        display: prints.
    """
    settings, step = start.settings, start.resume["position"]["step"] if start.resume else 0
    gone = record.cut(start.resume["record"] if start.resume else {}, step)
    if steps := gone.get("steps"):
        display.say(f"The record leaves out {steps} steps that were done after step {step}: they are done again")
    record.update("settings", **idle.only_read(settings))
    remarks = idle.remarks(settings)
    found = {**told, **({"settings": remarks} if remarks else {})}
    record.update("told", **{subject: "\n".join(lines).splitlines() for subject, lines in found.items()})
