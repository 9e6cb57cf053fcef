"""The side effects of a step while it is audited: a replay runs no Python, and would skip them.

Prints and log records keep no step from being captured; writes to files, seeded random streams and clocks that are read
do. Python's `print` and `logging.Logger.handle` are replaced in this thread while the block runs. Functions in C are
monitored (`hotloop.step.audit.call_monitor`). Up to Python 3.11 a profiler takes the one place for that: beside one,
only prints, log records and torch's generators are seen.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import linecache
import logging
import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import draws_elsewhere, is_torchs
from hotloop._torch.graphs import is_own_file, is_standard_library
from hotloop._torch.random_state import PYTHON
from hotloop._torch.thread_patch import replaced
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.audit.impure_calls import (
    CALLED,
    WRITE_OUTSIDE,
    effect_of,
    effect_of_library,
    is_file,
    may_keep,
)
from hotloop.step.audit.listener import Listener
from hotloop.step.audit.op_trace import own_place, trace_step
from hotloop.step.guard.bytecode import BY_NAME
from hotloop.step.guard.code_reads import NEVER_FOLLOWED
from hotloop.step.obstacle import DRAW_FROM_TORCH, RUNS, Obstacle
from hotloop.step.state.rng_usage import FROM_PYTHON, drawn_by, is_pythons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from hotloop.step.audit.impure_calls import Effect
    from hotloop.step.guard.recorder import Recorder

_NOT_THE_STEPS = ("hotloop", "torch", "py.warnings")
"""Loggers whose records are made about the step, and not by it."""
_UNASKED = frozenset({"warnings", "linecache", "inspect", "traceback"})
"""Modules of Python's that read sources to show them."""
_SEEDS = frozenset({"manual_seed", "seed", "setstate"})
_HEARD = CALLED | _SEEDS | FROM_PYTHON | BY_NAME
_SEED_BEFORE = (
    f"seed before the loop, once, and draw from torch's own stream: {RUNS}, and each step draws on from where the last "
    "one ended"
)


class SideEffects(Listener):
    """The lines of a step that print, log, write files or seed random streams, each once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[tuple[str, int], str] = {}
        self.obstacles: list[Obstacle] = []
        """What keeps the step from being captured."""
        self._drawn: set[str] = set()
        self._saying = 0
        """How many prints and log records are on their way: what they write is theirs."""
        self._stopped = False
        self._in_operation = False
        """A kernel runs: what one that is written in Python reads is its own."""
        self.recorder: Recorder | None = None
        """Hears what the step's code reads."""
        self._all = CallMonitor(
            _HEARD,
            functools.partial(self.ours, self._called),
            functools.partial(self.ours, self._began, instead=False),
            functools.partial(self.ours, self._ended),
            NEVER_FOLLOWED,
        )

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the block prints, logs, writes and seeds; all of it reaches whom it reaches otherwise."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(builtins, "print", self._prints))
            stack.enter_context(replaced(logging.Logger, "handle", self._logs))
            if (numpys := sys.modules.get("numpy.random")) is not None:  # its functions are none of C's to Python
                stack.enter_context(replaced(numpys, "seed", self._numpys_seed))
                stack.enter_context(replaced(numpys, "set_state", self._numpys_seed))
            # Calls are heard in this thread: a backward on a GPU would run the user's hooks in another one.
            stack.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
            self.own_compiles.begin()
            stack.enter_context(self._all.heard())
            yield

    def hear(self, on: bool) -> None:
        """Listen to calls, or leave them unheard for a while."""
        self._all.hear(on)

    def stop(self) -> None:
        """Listen no more, though the block runs on: prints, writes and seeds are not noted either."""
        self._all.stop()
        self.recorder, self._stopped = None, True

    @property
    def complete(self) -> bool:
        """Whether the last block was heard throughout."""
        return self._all.complete

    def operation(self, kwargs: dict[str, Any]) -> None:
        """Hear which generator an operation draws from: a recording has torch's own, and goes on with no other."""
        self._in_operation = True
        if draws_elsewhere(kwargs):
            self._obstacle("the step draws from a torch.Generator of its own", DRAW_FROM_TORCH)

    def has_run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note which of torch's streams an operation has drawn from."""
        self._in_operation = False
        if drawn := drawn_by(operation, args, kwargs, result):
            self._drawn |= drawn
            self.own_compiles.drew()

    def drawn(self) -> set[str] | None:
        """Name the streams that the step drew from, numpy's apart; None where that was not heard throughout."""
        return self._drawn if self._all.complete else None

    def __str__(self) -> str:
        """List the lines that print or log, for a message; empty where nothing was printed or logged."""
        return "; ".join(
            f"{what} at {file}:{line}: {linecache.getline(file, line).strip()}"
            for (file, line), what in self._places.items()
        )

    def _prints(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def print_(*args: Any, **kwargs: Any) -> Any:
            self.ours(self._printed, kwargs.get("file"))
            return self._said(real, *args, **kwargs)

        return print_

    def _printed(self, file: Any) -> None:
        if is_file(file):
            self._obstacle("the step writes to a file (print)", WRITE_OUTSIDE, not_repeatable=True)
        else:
            self._note("print")

    def _logs(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> Any:
            if record.name.partition(".")[0] not in _NOT_THE_STEPS and record.name not in _NOT_THE_STEPS:
                self.ours(self._note, "a log record")
            return self._said(real, logger, record)

        return handle

    def _numpys_seed(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            self.ours(self._obstacle, "the step seeds numpy's random stream", _SEED_BEFORE)
            return real(*args, **kwargs)

        return seed

    def _said(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._saying += 1
        try:
            return real(*args, **kwargs)
        finally:
            self._saying -= 1

    def _began(self, code: CodeType, frame: FrameType) -> bool:
        """Note a function that begins, which may save to a file; return whether its code is worth listening to."""
        if self.own_compiles.began(code, frame):
            return True
        recorder = self.recorder
        if recorder is None:
            heard = False
        else:
            heard = recorder.hears(code) if self._in_operation else recorder.began(code, frame)
        if not may_keep(code.co_name):
            return heard
        if not self._saying and (effect := effect_of_library(frame)) is not None and _runs_for_the_step(frame.f_back):
            self._take(effect)
        return True

    def _ended(self, code: CodeType, frame: FrameType, value: Any) -> None:
        """Hear of a function that returns or yields."""
        if self.recorder is not None and not self._in_operation:
            self.recorder.returned(code, frame, value)

    def _called(self, frame: FrameType, name: str, owner: Any) -> None:
        """Hear of what is called in C."""
        if name in BY_NAME:
            if self.recorder is not None and not self._in_operation:
                self.recorder.asks(frame)
        elif name in FROM_PYTHON:
            self._drawn |= {PYTHON} if is_pythons(owner) else set()
        elif self._saying:
            return
        elif name in _SEEDS and isinstance(owner, torch.Generator):
            own = not is_torchs(owner) and _is_own(frame)
            what = "a torch.Generator" if own else "torch's random stream"
            self._obstacle(f"the step seeds {what} ({name})", _SEED_BEFORE)
        elif name in _SEEDS and isinstance(owner, random.Random):
            made = frame.f_back is not None and frame.f_back.f_code is random.Random.__init__.__code__  # in the step
            if not made and _runs_for_the_step(frame):
                self._obstacle(f"the step seeds Python's random stream ({name})", _SEED_BEFORE)
        elif (effect := effect_of(name, owner)) is not None:
            if not (_is_own(frame) if effect.direct else _runs_for_the_step(frame)):
                return
            self._take(effect)

    def _take(self, effect: Effect) -> None:
        if effect.said:
            self._note(effect.reason)
        else:
            self._obstacle(effect.reason, effect.hint, not_repeatable=effect.not_repeatable)

    def _note(self, what: str) -> None:
        if not self._stopped and (place := own_place()) is not None:
            self._places.setdefault(place, what)

    def _obstacle(self, reason: str, hint: str, *, not_repeatable: bool = False) -> None:
        if self._stopped:
            return
        file, line = own_place() or (None, None)
        before = next((one for one in self.obstacles if (one.file, one.line) == (file, line)), None)
        if before is not None and (before.not_repeatable or not not_repeatable):
            return
        others = [one for one in self.obstacles if one is not before]
        # What may not be done twice comes first: a file is opened before it is written.
        self.obstacles = sorted(
            [*others, Obstacle(reason, hint, file, line, not_repeatable)], key=lambda one: not one.not_repeatable
        )


def _is_own(frame: FrameType) -> bool:
    return is_own_file(frame.f_code.co_filename)


def _runs_for_the_step(frame: FrameType | None) -> bool:
    """Return whether the program's own code makes the call, itself or through Python's library (json, pathlib).

    A library fills caches of its own at a first call (numba, Triton), and Python shows warnings and imports modules.
    """
    while frame is not None and frame.f_code is not trace_step.__code__:
        file = frame.f_code.co_filename
        if is_own_file(file):
            return True
        pythons = is_standard_library(file) or (file.startswith("<frozen ") and "importlib" not in file)
        if not pythons or frame.f_globals.get("__name__") in _UNASKED:
            return False
        frame = frame.f_back
    return False
