"""Replaces functions of torch's for one thread and the backwards that it starts.

An attribute of a module or a class is the whole process's. So the first thread that asks puts a dispatcher there, and
the last thread takes it off. The dispatcher calls each thread's own replacement, and the real function for all others.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_of_thread: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("hotloop.replaced", default=None)


class _Slot:
    """An attribute, its dispatcher, and how many threads want the dispatcher in place."""

    lock = threading.Lock()
    known: ClassVar[dict[tuple[int, str], _Slot]] = {}
    """By owner and name. Kept for good: compiled code is guarded on the identity of the dispatcher that it calls."""
    _absent = object()

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.wanted = owner, name, 0
        self.asked: list[Any] = []
        """The replacements of all threads, in the order in which they asked."""
        self.real: Callable[..., Any] = getattr(owner, name)
        self._own: Any = self._absent

        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            return self.mine()(*args, **kwargs)

        dispatcher.__name__ = name
        self.dispatcher = dispatcher

    def mine(self) -> Any:
        """Return the function that the running thread is to call."""
        return _asked_for(self, self.asked, self.real)

    def install(self, *, constant: bool) -> None:
        """Put the dispatcher in place, or count another thread that wants it there."""
        if constant and "torch._dynamo" in sys.modules:
            torch.compiler.assume_constant_result(self.dispatcher)  # type: ignore[no-untyped-call]  # else traced into
        self.wanted += 1
        if self.wanted == 1 and getattr(self.owner, self.name) is not self.dispatcher:
            self.real, self._own = getattr(self.owner, self.name), vars(self.owner).get(self.name, self._absent)
            setattr(self.owner, self.name, self.dispatcher)

    def remove(self) -> None:
        """Take the dispatcher off after the last thread."""
        self.wanted -= 1
        if self.wanted:
            return
        if vars(self.owner).get(self.name) is not self.dispatcher:
            del self.known[id(self.owner), self.name]  # somebody has wrapped it, and takes it for the real function
        elif self._own is self._absent:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


def _asked_for(key: Any, asked: Sequence[Any], other: Any) -> Any:
    """Return the value that the running thread, or the thread whose backward it runs, set for a key; else ``other``."""
    table = _of_thread.get()
    if table is None:
        try:  # a thread of torch's own: since 2.12 it has the context of the thread that called backward
            table = private("torch._C:_get_obj_in_tls")("context").get(_of_thread)
        except (CapabilityMissingError, RuntimeError):
            in_backward = private("torch._C:_current_graph_task_id")() != -1
            return asked[-1] if in_backward and asked else other
    return (table or {}).get(key, other)


@contextlib.contextmanager
def called_here(here: Callable[..., None], elsewhere: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Yield a function that calls ``here`` in this thread and in backwards that it starts, else ``elsewhere``.

    For hooks that are the whole process's, in which other threads may train as well.
    """
    key = object()

    def call(*args: Any, **kwargs: Any) -> None:
        _asked_for(key, (here,), elsewhere)(*args, **kwargs)

    before = _of_thread.set({**(_of_thread.get() or {}), key: here})
    try:
        yield call
    finally:
        _of_thread.reset(before)


@contextlib.contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Any], *, constant: bool = False
) -> Iterator[None]:
    """Call ``make(real)`` in the place of ``owner.name`` while the block runs.

    This holds for this thread, and for the backwards that it starts in the block. On a GPU these run in threads of
    torch's own, where torch 2.11 does not say whose backward it is: the replacement that was asked for last is called.

    Args:
        owner: a module or a class.
        name: a function or method of it.
        make: makes the replacement out of the real function.
        constant: whether its result may be burnt into compiled code.
    """
    with _Slot.lock:
        slot = _Slot.known.get((id(owner), name)) or _Slot.known.setdefault((id(owner), name), _Slot(owner, name))
        slot.install(constant=constant)
    replacement = make(slot.real)
    slot.asked.append(replacement)
    before = _of_thread.set({**(_of_thread.get() or {}), slot: replacement})
    try:
        yield
    finally:
        _of_thread.reset(before)
        slot.asked.remove(replacement)
        with _Slot.lock:
            slot.remove()
