"""Runs one question in a child process with a time limit: what crashes or hangs there is an answer, and no trouble."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST = 400
_WINDOWS = sys.platform == "win32"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a child said: the JSON object of its last line, or why there is none."""

    data: Mapping[str, Any] | None
    error: str = ""


def ask(arguments: Sequence[str], *, limit_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run this Python with arguments, and give what it printed last; its compile workers end with it.

    Args:
        arguments: after the interpreter: ``-m module argument``.
        limit_s: seconds after which it is killed.
        environment: of the child; None takes this process's.
    """
    # -P: a file of the folder that the user stands in must not be taken for a module of Python's or torch's.
    command = [sys.executable, "-P", *arguments]
    with subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=None if environment is None else dict(environment),
        start_new_session=not _WINDOWS,
    ) as child:
        try:
            out, err = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _kill(child)
            child.communicate()
            return Answer(None, f"no answer after {limit_s:.0f} s")
        finally:
            _kill(child)
    return _read(child.returncode, out, err)


def _kill(child: subprocess.Popen[str]) -> None:
    """End a child and what it started."""
    if _WINDOWS:
        child.kill()
        return
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _read(code: int, out: str, err: str) -> Answer:
    said = [each.strip() for each in out.splitlines() if each.strip()]
    try:
        data = json.loads(said[-1]) if said else None
    except ValueError:
        data = None
    if code == 0 and isinstance(data, dict):
        return Answer(data)
    lines = [each.strip() for each in err.splitlines() if each.strip()]
    if code < 0:
        names = {one.value: one.name for one in signal.Signals}
        return Answer(None, f"the process crashed with signal {names.get(-code, -code)}")
    return Answer(None, (lines[-1] if lines else f"it ended with exit code {code} and said nothing")[:_LONGEST])
