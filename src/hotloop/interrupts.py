"""Interrupts wait while a program's state is exchanged, restored or written back.

Python runs the handlers of signals in the main thread, between any two instructions: Ctrl-C raises there, and so does
a job's time limit in many programs. A state of which half was put back is nobody's. So the handlers run after the
state is whole again, or at once where the user's step runs, since a step or a compile may take long.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SIGNALS = signal.valid_signals()  # a third of what holding signals off would cost


class _Handler:
    """Stands in the place of a handler of the program's own, which it calls where signals do not wait.

    The program may find it there, and call or put it back at any later time (a data loader made in a step does so).
    """

    def __init__(self, handlers: _Handlers, own: Any) -> None:
        self._handlers, self.own = handlers, own

    def __call__(self, number: int, frame: Any) -> None:
        if self._handlers.wait:
            self._handlers.waiting.append(number)
        else:
            self.own(number, frame)


class _Handlers:
    """The handlers of signals that are put aside for a while.

    Attributes:
        aside: the program's own handlers are put aside, and ours stand in their place.
        wait: signals wait; else the program's own handlers are called at once.
        waiting: the signals that came, and what a handler raised before it was put aside.
    """

    def __init__(self) -> None:
        self.aside = self.wait = False
        self._ours: dict[int, _Handler] = {}
        """By number of the signal."""
        self.waiting: list[int | BaseException] = []

    def put_aside(self) -> None:
        """Let signals wait from now on."""
        self.aside = self.wait = True
        for number in _SIGNALS:
            own = signal.getsignal(number)
            if callable(own) and own is not self._ours.get(number):
                self._ours[number] = _Handler(self, own)
                signal.signal(number, self._ours[number])

    def put_back(self) -> None:
        """Let the program's own handlers be called again, also for the signals that waited."""
        try:
            self.aside = self.wait = False  # in the block, since from here on the program's own handler may raise
            for number, ours in list(self._ours.items()):
                stands = signal.getsignal(number)
                if isinstance(stands, _Handler) and stands is ours:  # else the program has put another one there
                    signal.signal(number, stands.own)
                del self._ours[number]
        finally:
            if self._ours:  # an interrupt came meanwhile
                self.put_back()
            self.deliver()

    def deliver(self) -> None:
        """Call the handlers of all signals that waited, also where an earlier handler raises, as Python does."""
        while self.waiting:
            waited = self.waiting.pop(0)
            try:
                if isinstance(waited, BaseException):
                    raise waited
                signal.raise_signal(waited)
            finally:
                self.deliver()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_handlers = _Handlers()


def uninterrupted(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that exchanges, restores or writes back state: signals wait until it has returned."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if _handlers.aside or not _in_main_thread():
            return function(*args, **kwargs)
        try:
            try:
                _handlers.put_aside()
            except BaseException as error:  # noqa: BLE001 - an interrupt came first: it waits as well
                _handlers.waiting.append(error)
                _handlers.put_aside()
            return function(*args, **kwargs)
        finally:
            _handlers.put_back()

    return run


def interruptible(run: Callable[[], _T]) -> _T:
    """Run the user's step: within an `uninterrupted` function, signals are handled as they come while it runs."""
    if not _handlers.wait or not _in_main_thread():
        return run()
    try:
        _handlers.wait = False
        _handlers.deliver()
        return run()
    finally:
        _handlers.wait = True
