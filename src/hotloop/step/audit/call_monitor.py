"""Monitors what Python calls while a step is audited: functions in C by their owner, Python functions as they begin.

Up to Python 3.11 a profile function sees each call, which takes as long as the step itself. From 3.12 on
`sys.monitoring` is told, place by place, where it need not call back.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop._torch.dispatch import AROUND_OPERATIONS
from hotloop._torch.dynamo import never_trace, set_tracer
from hotloop._torch.graphs import is_own_file, is_standard_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    Called = Callable[[FrameType, str, Any], None]
    """Told of a call in C: who calls, the function's name, and what it belongs to."""
    # A frame's code comes along: where a library listens to Python's audit events, asking a frame for it calls that.
    Began = Callable[[CodeType, FrameType], bool]
    """Told of a function of Python's that begins, or of a generator that goes on; returns whether to be told again."""
    Ended = Callable[[CodeType, FrameType, Any], None]
    """Told of what a function returns or yields."""

# A method in C that is given its class has a type of its own, which `types` does not name; `match` is one.
_IN_C = frozenset(
    {types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType, type(re.compile("").match)}
)

_UNREAD = (*(os.path.join(Path(__file__).parents[2] / folder, "") for folder in ("step", "_torch")), *AROUND_OPERATIONS)  # noqa: PTH118
"""Files whose functions run at each operation of an audited step, and return nothing that the step's code reads."""

_CALLBACKS = ("_profile", "_start", "_end", "_calls", "_starts", "_ends")

if sys.version_info >= (3, 12):

    def _free_tool() -> int | None:
        """Take one of the tools that are nobody's by Python's docs; None where others have them, or other threads."""
        for tool in (3, 4):
            try:
                sys.monitoring.use_tool_id(tool, "hotloop")
            except ValueError:
                continue
            return tool
        return None


class CallMonitor:
    """The calls of one thread, heard in a block.

    Args:
        names: of the functions in C that are told of.
        called: is told of them.
        began: is told of functions of Python's; None where these do not matter.
        ended: is told of what they return.
        plain: types of results that say nothing, whoever called: of code that is not listened to they are not told.

    Attributes:
        complete: whether the last block was heard from its begin to its end.
    """

    def __init__(
        self,
        names: frozenset[str],
        called: Called,
        began: Began | None = None,
        ended: Ended | None = None,
        plain: frozenset[type] = frozenset(),
    ) -> None:
        self._names, self._called, self._began, self._ended = names, called, began, ended
        self._plain = plain
        self.complete = False
        self._hook = self._profile
        self._left_out: dict[int, types.CodeType] = {}
        """Code that no listener wants to hear of, by identity: Python works out the hash of a code each time."""
        self._thread = 0
        self._tool: int | None = None
        self._profiling = 0
        """The thread that a profile function of ours hears; 0 where none does."""

    def heard(self) -> contextlib.AbstractContextManager[None]:
        """Hear while the block runs, unless somebody else has the place for that: up to Python 3.11 a profiler."""
        self.complete = False
        if "torch._dynamo" in sys.modules:
            for function in (
                _untraced,
                *(getattr(CallMonitor, name) for name in _CALLBACKS if hasattr(CallMonitor, name)),
            ):
                never_trace(function)
        if sys.version_info >= (3, 12):
            return self._monitored()
        return self._profiled()

    def hear(self, on: bool) -> None:
        """Leave calls unheard for a while; a monitor leaves the places of a library, and ours, out anyway."""
        if self._profiling == threading.get_ident() and sys.getprofile() is (None if on else self._hook):
            sys.setprofile(self._hook if on else None)  # else the step itself has begun to profile

    def stop(self) -> None:
        """Leave calls unheard from now on, to the end of the block."""
        self.complete = False
        self.hear(False)
        self._profiling = 0
        if sys.version_info >= (3, 12) and self._tool is not None:
            sys.monitoring.set_events(self._tool, sys.monitoring.events.NO_EVENTS)

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        if sys.getprofile() is not None:
            yield
            return
        self._profiling = threading.get_ident()
        self.hear(True)
        try:
            yield
        finally:
            self.complete = sys.getprofile() is self._hook
            self.hear(False)
            self._profiling = 0

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._start(frame.f_code, frame)
        elif event == "return":
            code = frame.f_code
            told = id(code) not in self._left_out
            if told or type(called) not in self._plain:
                self._end(code, frame, called, told=told)
        elif event == "c_call" and (name := getattr(called, "__name__", "")) in self._names:
            _untraced(self._called, frame, name, getattr(called, "__self__", None))

    def _start(self, code: CodeType, frame: FrameType) -> bool:
        """Report a function that begins; return whether its code is worth listening to."""
        if self._began is None or id(code) in self._left_out:
            return False
        told: bool = _untraced(self._began, code, frame)
        if not told:
            self._left_out[id(code)] = code
        return told

    def _end(self, code: CodeType, frame: FrameType, value: Any, *, told: bool) -> None:
        """Report what a function returns, if its own code is listened to (``told``), or its caller's."""
        if not told and (caller := frame.f_back) is not None:
            told = id(caller.f_code) not in self._left_out
        if told and self._ended is not None:
            _untraced(self._ended, code, frame, value)

    if sys.version_info >= (3, 12):

        @contextlib.contextmanager
        def _monitored(self) -> Iterator[None]:
            tool = self._tool = _free_tool()
            self.complete = tool is not None
            if tool is None:
                yield
                return
            events, self._thread = sys.monitoring.events, threading.get_ident()
            callbacks: dict[int, Any] = {events.CALL: self._calls}
            if self._began is not None:
                callbacks |= {events.PY_START: self._starts, events.PY_RESUME: self._starts}
            if self._ended is not None:
                callbacks |= {events.PY_RETURN: self._ends, events.PY_YIELD: self._ends}
            try:
                for event, callback in callbacks.items():
                    sys.monitoring.register_callback(tool, event, callback)
                sys.monitoring.restart_events()  # another block may have left out what counts in this one
                sys.monitoring.set_events(tool, sum(callbacks))
                yield
            finally:
                sys.monitoring.set_events(tool, events.NO_EVENTS)
                for event in callbacks:
                    sys.monitoring.register_callback(tool, event, None)
                sys.monitoring.free_tool_id(tool)
                self._tool = None

        def _calls(self, code: types.CodeType, _offset: int, function: Any, first: Any) -> Any:
            in_c = type(function) in _IN_C  # of a user's object not even the name is asked: that is code of theirs
            name = function.__name__ if in_c else ""
            if name not in self._names:
                # What a library's code calls directly is its own affair, whatever else is called there later.
                file = code.co_filename
                return None if is_own_file(file) or is_standard_library(file) else sys.monitoring.DISABLE
            if threading.get_ident() == self._thread:
                _untraced(self._called, sys._getframe(1), name, getattr(function, "__self__", first))  # noqa: SLF001
            return None

        def _starts(self, code: types.CodeType, _offset: int) -> Any:
            if threading.get_ident() != self._thread:
                return None
            return None if self._start(code, sys._getframe(1)) else sys.monitoring.DISABLE  # noqa: SLF001 - what begins

        def _ends(self, code: types.CodeType, _offset: int, value: Any) -> Any:
            told = id(code) not in self._left_out
            if not told:
                if code.co_filename.startswith(_UNREAD):
                    return sys.monitoring.DISABLE  # most functions that end are these
                if type(value) in self._plain:
                    return None
            if threading.get_ident() == self._thread:
                self._end(code, sys._getframe(1), value, told=told)  # noqa: SLF001 - what ends
            return None


def _untraced(told: Callable[..., Any], *args: Any) -> Any:
    """Report a call while nothing is traced: a compiler that traces the step must not trace our code.

    Who is told catches what it raises itself (`Listener.ours`): it would end the user's call.
    """
    before = set_tracer(None)
    try:
        return told(*args)
    finally:
        set_tracer(before)
