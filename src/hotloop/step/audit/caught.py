"""Whether a library's check runs now, and whether code around it may catch what it raises."""

from __future__ import annotations

import dis
import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hotloop._torch.frames import shown
from hotloop._torch.graphs import is_own_file

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet
    from types import CodeType, FrameType

_RAISE_AGAIN = (str(Path(__file__).parents[2]), inspect.getfile(torch.nn.Module))
"""Where no code ends a check's error: hotloop's own, and the call of a module with hooks, which raises it again."""
_OTHERS = ("KeyboardInterrupt", "SystemExit")
"""What no check raises."""


def check_running(checks: AbstractSet[CodeType], audit: CodeType) -> tuple[bool, str]:
    """Return whether one of some checks runs in a step, and where its error may be caught; empty for nowhere.

    Code of the step may catch it, and so may the program's code that leads to its call.

    Args:
        checks: the code of the checks.
        audit: the function of hotloop that runs the step.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in checks:
        frame = frame.f_back
    if frame is None:
        return False, ""
    while frame is not None and frame.f_code is not audit:
        if not frame.f_code.co_filename.startswith(_RAISE_AGAIN) and _catches(frame):
            return True, _place(frame)
        frame = frame.f_back
    if frame is None:  # of a thread of autograd's nobody sees who started it
        return True, "around the thread of torch's that it runs in"
    while frame is not None and not (is_own_file(frame.f_code.co_filename) and _catches(frame)):
        frame = frame.f_back
    return True, _place(frame) if frame is not None else ""


def _place(frame: FrameType) -> str:
    return shown((frame.f_code.co_filename, frame.f_lineno))


def _catches(frame: FrameType) -> bool:
    """Return whether a frame is within ``try ... except`` now, or in code that calls `contextlib.suppress`.

    ``with`` of any other context manager counts for none: hardly one swallows errors.
    """
    return "suppress" in frame.f_code.co_names or _may_end_errors(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=1024)
def _may_end_errors(code: CodeType, place: int) -> bool:
    """Return whether code may end an error that is raised at a place; places are offsets in bytes.

    ``with`` and ``finally`` raise it again. What is around these may end it then.
    """
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # not in typeshed
    raised: int | None = place
    while raised is not None:
        handler = next((one.target for one in entries if one.start <= raised < one.end), None)
        if handler is None:
            return False
        raised = _raised_again(code, handler)
    return True


def _raised_again(code: CodeType, handler: int) -> int | None:
    """Return where a handler raises an error again; None where it may end it."""
    place, before, tidies, jumps = handler, "", False, False
    for one in dis.get_instructions(code):
        if one.offset < place:
            continue
        if one.offset == handler:
            tidies = one.opname != "PUSH_EXC_INFO"  # Python's own, which ends none
        if one.opname in ("RERAISE", "CLEANUP_THROW"):
            return one.offset
        if jumps:
            place = one.argval  # where the next kind of error is looked for
        jumps = one.opname == "CHECK_EXC_MATCH" and before in _OTHERS
        ends = one.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT")
        if ends and not jumps and not tidies:
            return None
        before = one.argval
    return None
