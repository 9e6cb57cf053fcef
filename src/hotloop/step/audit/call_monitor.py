"""Hears what Python calls while a step is looked at: functions in C by what they belong to, others as they begin.

Up to Python 3.11 a profile function hears every call there is, which takes as long as the step itself; from 3.12 on
`sys.monitoring` is told, place by place, where nothing is to be heard.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

from hotloop._torch.graphs import is_own_file, is_standard_library
from hotloop.step.audit.impure_calls import may_keep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    Called = Callable[[FrameType, str, Any], None]
    """Told of a call in C: who calls, the function's name, and what it belongs to."""
    Began = Callable[[FrameType], None]
    """Told of a function of Python's that begins."""

_IN_C = frozenset({types.BuiltinFunctionType, types.MethodDescriptorType, types.ClassMethodDescriptorType})

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


class Calls:
    """The calls of one thread, heard in a block.

    Args:
        names: of the functions in C that are told of.
        called: is told of them.
        began: is told of functions of Python's.
        always: identities of code that it is told of each time, and not only where it may write or seed something.

    Attributes:
        complete: whether the last block was heard from its begin to its end.
    """

    def __init__(self, names: frozenset[str], called: Called, began: Began, always: frozenset[int]) -> None:
        self._names, self._called, self._began, self._always = names, called, began, always
        self.complete = False
        self._hook = self._profile
        self._profiling = 0
        """The thread that a profile function of ours hears; 0 where none does."""

    def heard(self) -> contextlib.AbstractContextManager[None]:
        """Hear while the block runs, unless somebody else has the place for that: up to Python 3.11 a profiler."""
        self.complete = False
        if sys.version_info >= (3, 12):
            return self._monitored()
        return self._profiled()

    def hear(self, on: bool) -> None:
        """Leave calls unheard for a while; the places of a library's, ours too, are not heard by a monitor anyway."""
        if self._profiling == threading.get_ident() and sys.getprofile() is (None if on else self._hook):
            sys.setprofile(self._hook if on else None)  # else the step itself has begun to profile

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
            self._began(frame)
        elif event == "c_call" and (name := getattr(called, "__name__", "")) in self._names:
            self._called(frame, name, getattr(called, "__self__", None))

    if sys.version_info >= (3, 12):

        @contextlib.contextmanager
        def _monitored(self) -> Iterator[None]:
            monitoring = sys.monitoring
            tool, always = _free_tool(), self._always
            self.complete = tool is not None
            if tool is None:
                yield
                return
            thread, names, called, began = threading.get_ident(), self._names, self._called, self._began

            def calls(code: types.CodeType, _offset: int, function: Any, first: Any) -> Any:
                in_c = type(function) in _IN_C  # of a user's object not even the name is asked: that is code of theirs
                name = function.__name__ if in_c else ""
                if name not in names:
                    # What a library's code calls directly is its own affair, whatever else is called there later.
                    file = code.co_filename
                    return None if is_own_file(file) or is_standard_library(file) else monitoring.DISABLE
                if threading.get_ident() == thread:
                    called(sys._getframe(1), name, getattr(function, "__self__", first))  # noqa: SLF001 - who calls
                return None

            def starts(code: types.CodeType, _offset: int) -> Any:
                if not may_keep(code.co_name) and id(code) not in always:
                    return monitoring.DISABLE
                if threading.get_ident() == thread:
                    began(sys._getframe(1))  # noqa: SLF001 - what begins
                return None

            events = monitoring.events
            try:
                monitoring.register_callback(tool, events.CALL, calls)
                monitoring.register_callback(tool, events.PY_START, starts)
                monitoring.set_events(tool, events.CALL | events.PY_START)
                yield
            finally:
                monitoring.set_events(tool, events.NO_EVENTS)
                monitoring.register_callback(tool, events.CALL, None)
                monitoring.register_callback(tool, events.PY_START, None)
                monitoring.free_tool_id(tool)
