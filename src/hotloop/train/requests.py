"""Requests to a run that trains: empty files in its folder, which it answers after a step and removes.

``requests/answers.json`` names what the run answers, and is there while the run trains. Whoever wants it makes an empty
file of that name beside it, such as ``requests/save``. All else in the folder is ignored. ``requests/answered.json``
has the last answer to each: the step, the time, and why it could not be done where it could not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import stat
import time
from typing import TYPE_CHECKING, Any

from hotloop.files import read, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FOLDER, ANSWERS, ANSWERED = "requests", "answers.json", "answered.json"
SAVE, SAMPLE = "save", "sample"
EVERY_SECONDS = 1.0
"""How often the folder is looked at: between two looks, a step costs a reading of the clock."""
_LARGEST = 2000


class Requests:
    """What a run was asked for.

    Args:
        folder: the run's; None where another process of the run answers.
        answers: the requests that it answers.
    """

    def __init__(self, folder: Path | None, answers: Sequence[str]) -> None:
        self._folder, self._answers = folder and folder / FOLDER, answers
        if self._folder and self._folder.is_symlink():  # a stranger's: what it leads to is not the run's
            self._folder = None
        self._asked: set[str] = set()
        self._answered: dict[str, dict[str, Any]] = {}
        self._next = math.inf if self._folder is None else 0.0
        if self._folder:
            with contextlib.suppress(OSError):  # a full disk: nobody can ask then, and the run goes on
                self._clear()  # what a killed run did not answer
                with whole(self._folder / ANSWERS, durable=False) as file:
                    file.write(json.dumps([*answers]).encode())

    def asked(self, name: str) -> bool:
        """Return whether something is asked for now."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + EVERY_SECONDS
            self._asked = {one for one in self._answers if self._folder and is_asked(self._folder.parent, one)}
        return name in self._asked

    def answered(self, name: str, step: int, problem: str = "") -> None:
        """Remove a request that has been answered after a step, and say so; nothing where there is none.

        Args:
            name: the request.
            step: how many steps are done.
            problem: why it could not be done; empty where it was.
        """
        if name in self._asked and self._folder:
            self._asked.discard(name)
            self._answered[name] = {"step": step, "time": time.time(), "problem": problem}
            try:
                with whole(self._folder / ANSWERED, durable=False) as file:
                    file.write(json.dumps(self._answered).encode())
                (self._folder / name).unlink(missing_ok=True)
            except OSError:  # read-only by now: what lies there would be answered again and again
                self._answers = [one for one in self._answers if one != name]

    def close(self) -> None:
        """Say that nothing is answered any more."""
        if self._folder:
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self._clear()
                self._folder.rmdir()

    def _clear(self) -> None:
        for name in (ANSWERS, ANSWERED, *self._answers):
            if self._folder:
                (self._folder / name).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a run has answered: after which step, when, and why it could not be done; empty where it was."""

    step: int
    time: float
    problem: str


def answered_by(run: Path) -> tuple[str, ...]:
    """Return what a run says that it answers."""
    found = _read(run / FOLDER / ANSWERS)
    return tuple(one for one in (SAVE, SAMPLE) if isinstance(found, list) and one in found)


def answers_of(run: Path) -> dict[str, Answer]:
    """Return the last answer of a run to each request that it has answered."""
    found = _read(run / FOLDER / ANSWERED)
    known = {name: found.get(name) for name in (SAVE, SAMPLE)} if isinstance(found, dict) else {}
    return {
        name: Answer(one["step"], one["time"], one["problem"])
        for name, one in known.items()
        if isinstance(one, dict)
        and type(one.get("step")) is int
        and type(one.get("time")) is float
        and isinstance(one.get("problem"), str)
    }


def _read(file: Path) -> Any:
    """Return what a small plain file has as JSON; None where it is none."""
    try:
        return json.loads(read(file, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return None


def is_asked(run: Path, name: str) -> bool:
    """Return whether a request lies in a run's folder: an empty plain file."""
    try:
        known = (run / FOLDER / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(known.st_mode) and not known.st_size


def ask(run: Path, name: str) -> None:
    """Ask a run for something; nothing new where it was asked before.

    Raises:
        OSError: the folder cannot be written, or is a link.
    """
    folder = run / FOLDER
    if folder.is_symlink():
        raise OSError(f"{folder} is a link")
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
