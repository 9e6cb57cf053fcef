"""What a step says while it is looked at: its prints and the log records that it makes, which no replay repeats.

Neither keeps a step from being captured. Python's own `print` and `logging.Logger.handle` are listened at, in this
thread and while the block runs; what writes by other means (a file, a progress bar, ``sys.stdout.write``) is not heard.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
import linecache
import logging
from typing import TYPE_CHECKING, Any

from hotloop._torch.graphs import is_own_file
from hotloop._torch.replaced import replaced
from hotloop.step.survey import survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOT_THE_STEPS = ("hotloop", "torch", "py.warnings")
"""Loggers whose records are made about the step, and not by it."""


class Heard:
    """The lines of a step that print or log, each once, in order."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], str] = {}

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note what the block prints and logs; both reach whom they reach otherwise."""
        with replaced(builtins, "print", self._prints), replaced(logging.Logger, "handle", self._logs):
            yield

    def __str__(self) -> str:
        """Give the lines, as a message names them; empty where nothing was said."""
        return "; ".join(
            f"{what} at {file}:{line}: {linecache.getline(file, line).strip()}"
            for (file, line), what in self._places.items()
        )

    def _prints(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def print_(*args: Any, **kwargs: Any) -> Any:
            self._note("print")
            return real(*args, **kwargs)

        return print_

    def _logs(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> Any:
            if record.name.partition(".")[0] not in _NOT_THE_STEPS and record.name not in _NOT_THE_STEPS:
                self._note("a log record")
            return real(logger, record)

        return handle

    def _note(self, what: str) -> None:
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not survey.__code__:
            if is_own_file(frame.f_code.co_filename):
                self._places.setdefault((frame.f_code.co_filename, frame.f_lineno), what)
                return
            frame = frame.f_back
