"""What a step does beside its operations while it is audited: a replay runs no Python, and would skip it.

Prints and log records keep no step from being captured, and are named once. Opening a file, changing files, starting a
program or a thread, and talking to another program do. Writing to a file that is open already is not noticed.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import inspect
import io
import linecache
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.graphs import is_own_file, is_standard_library, is_user_file
from hotloop._torch.thread_patch import replaced
from hotloop.step.audit.op_trace import own_place, trace_step
from hotloop.step.obstacle import RUNS, Obstacle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.audit.findings import Look

_NOT_THE_STEPS = ("hotloop", "torch", "py.warnings")
"""Loggers whose records are made about the step, and not by it."""
_OUTSIDE = f"do it outside the step, every so many steps: {RUNS}"
_PRINT_IT = "return the tensor, and print or log it outside the step, every so many steps"
_FILES = ("remove", "unlink", "rename", "replace", "mkdir", "makedirs")
_IMPURE: tuple[tuple[Any, str, str], ...] = (
    (builtins, "open", "opens a file"),
    (io, "open", "opens a file"),
    (os, "open", "opens a file"),
    (torch, "save", "writes to a file (torch.save)"),
    *((os, name, f"changes files (os.{name})") for name in _FILES),
    (os, "system", "starts a program"),
    (os, "urandom", "draws from the system's random numbers (os.urandom)"),
    (subprocess.Popen, "__init__", "starts a program"),
    (socket.socket, "connect", "talks to another program"),
    (threading.Thread, "start", "starts a thread"),
)
"""Functions that do what no replay does again, and what a step that calls them does."""
_SEEDS: tuple[tuple[Any, str, str], ...] = (
    (torch, "manual_seed", "torch's random stream"),
    (torch, "seed", "torch's random stream"),
    (torch.cuda, "manual_seed", "torch's random stream"),
    (torch.cuda, "manual_seed_all", "torch's random stream"),
    (random, "seed", "Python's random stream"),
)
_SEED_BEFORE = (
    f"seed before the loop, once, and draw from torch's own stream: {RUNS}, and each step draws on from where the last "
    "one ended"
)


class Effects:
    """Hears what one step prints, logs, opens, starts and seeds.

    Attributes:
        obstacles: what keeps it from being captured.
    """

    def __init__(self, look: Look) -> None:
        self._look = look
        self.obstacles: list[Obstacle] = []
        self._said: dict[tuple[str, int], str] = {}
        self._saying = 0
        """How many prints and log records are on their way: what they write is theirs."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear what the block does; all of it is done."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(builtins, "print", functools.partial(self._says, "print")))
            stack.enter_context(replaced(logging.Logger, "handle", functools.partial(self._says, "a log record")))
            for owner, name, does in _IMPURE:
                note = functools.partial(self._obstacle, f"the step {does}", _OUTSIDE)
                stack.enter_context(replaced(owner, name, functools.partial(self._heard, note)))
            numpys = sys.modules.get("numpy.random")
            seeds = (*_SEEDS, *(((numpys, "seed", "numpy's random stream"),) if numpys is not None else ()))
            for owner, name, stream in seeds:
                note = functools.partial(self._obstacle, f"the step seeds {stream}", _SEED_BEFORE)
                stack.enter_context(replaced(owner, name, functools.partial(self._heard, note)))
            yield

    def __str__(self) -> str:
        """List the lines that print or log, for a message; empty where nothing was printed or logged."""
        lines = ((what, *place, linecache.getline(*place).strip()) for place, what in self._said.items())
        return "; ".join(f"{what} at {file}:{line}: {text}" for what, file, line, text in lines)

    def _heard(self, note: Callable[[], None], real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if not self._saying and _runs_for_the_step(inspect.currentframe()):
                self._look.ours(note)
            return real(*args, **kwargs)

        return heard

    def _obstacle(self, reason: str, hint: str) -> None:
        file, line = own_place() or (None, None)
        if all((one.file, one.line) != (file, line) for one in self.obstacles):
            self.obstacles.append(Obstacle(reason, hint, file, line, not_repeatable=hint is _OUTSIDE))

    def _says(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def says(*args: Any, **kwargs: Any) -> Any:
            self._look.ours(self._note, what, args)
            self._saying += 1
            try:
                return real(*args, **kwargs)
            finally:
                self._saying -= 1

        return says

    def _note(self, what: str, args: tuple[Any, ...]) -> None:
        record = next((one for one in args if isinstance(one, logging.LogRecord)), None)
        ours = record is not None and record.name.partition(".")[0] in _NOT_THE_STEPS
        if ours or (place := own_place()) is None:
            return
        self._said.setdefault(place, what)
        if any(isinstance(one, torch.Tensor) for one in (*args, *(record.args or () if record is not None else ()))):
            self._obstacle(f"a value is read on the host: {what}", _PRINT_IT)  # torch writes it past the dispatcher


def _runs_for_the_step(frame: Any) -> bool:
    """Return whether the program's own code makes a call, itself or through Python's library (json, pathlib).

    A library fills caches of its own at a first call, torch compiles what torch.cond is given, and Python shows
    warnings and imports modules.
    """
    while frame is not None and frame.f_code is not trace_step.__code__:
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__")).startswith(("torch._dynamo.", "torch._inductor.")):
            return False
        if is_own_file(file):
            return True
        pythons = is_standard_library(file) and frame.f_globals.get("__name__") not in ("warnings", "linecache")
        if (is_user_file(file) and not pythons) or "importlib" in file:
            return False
        frame = frame.f_back
    return False
