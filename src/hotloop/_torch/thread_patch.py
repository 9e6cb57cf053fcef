"""Puts functions of ours in the place of torch's, for one thread and the backwards that it starts.

An attribute of a module or a class is the whole process's. So what is put there is one dispatcher, by the first thread
that asks, and taken off by the last; it gives each thread that asked its own replacement, and all others the real one.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ABSENT = object()
_lock = threading.Lock()
_slots: dict[tuple[int, str], _Slot] = {}
"""Kept for good: compiled code is guarded on the identity of a dispatcher that it was traced with."""
_of_thread: contextvars.ContextVar[dict[Any, Any] | None] = contextvars.ContextVar("hotloop.replaced", default=None)


class _Slot:
    """One attribute, its dispatcher, and how many want it in place."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.wanted = owner, name, 0
        self.asked: list[Any] = []
        """The replacements of all threads, in the order in which they asked."""
        self.real: Callable[..., Any] = getattr(owner, name)
        self._own: Any = _ABSENT

        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            return self.mine()(*args, **kwargs)

        dispatcher.__name__ = name
        self.dispatcher = dispatcher

    def mine(self) -> Any:
        """Give what the running thread is to call."""
        return _asked_for(self, self.asked, self.real)

    def put_in(self, *, constant: bool) -> None:
        if constant and "torch._dynamo" in sys.modules:
            torch.compiler.assume_constant_result(self.dispatcher)  # type: ignore[no-untyped-call]  # else traced into
        self.wanted += 1
        if self.wanted == 1 and getattr(self.owner, self.name) is not self.dispatcher:
            self.real, self._own = getattr(self.owner, self.name), vars(self.owner).get(self.name, _ABSENT)
            setattr(self.owner, self.name, self.dispatcher)

    def take_out(self) -> None:
        self.wanted -= 1
        if self.wanted:
            return
        if vars(self.owner).get(self.name) is not self.dispatcher:
            del _slots[id(self.owner), self.name]  # somebody has wrapped it: to them it is the real one from here on
        elif self._own is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._own)


def _asked_for(key: Any, asked: Sequence[Any], other: Any) -> Any:
    """Give what the running thread asked for under a key, or what started the backward that it runs; else ``other``."""
    table = _of_thread.get()
    if table is None:
        try:  # in a thread of torch's: since 2.12 it has the context of the thread that called backward
            table = private("torch._C:_get_obj_in_tls")("context").get(_of_thread)
        except (CapabilityMissingError, RuntimeError):
            in_backward = private("torch._C:_current_graph_task_id")() != -1
            return asked[-1] if in_backward and asked else other
    return (table or {}).get(key, other)


@contextlib.contextmanager
def called_here(here: Callable[..., None], elsewhere: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """Give what calls one function in this thread, and in the backwards that it starts in the block, else another.

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
    """Have ``make(real)`` called in the place of ``owner.name`` while the block runs.

    By this thread, and by the backwards that it starts in the block, which run in threads of torch's own on a GPU.
    There torch 2.11 does not tell whose backward it is: what was asked for last is called.

    Args:
        owner: a module or a class.
        name: a function or method of it.
        make: makes the replacement out of the real one.
        constant: what it answers may be burnt into compiled code.
    """
    with _lock:
        slot = _slots.get((id(owner), name)) or _slots.setdefault((id(owner), name), _Slot(owner, name))
        slot.put_in(constant=constant)
    replacement = make(slot.real)
    slot.asked.append(replacement)
    before = _of_thread.set({**(_of_thread.get() or {}), slot: replacement})
    try:
        yield
    finally:
        _of_thread.reset(before)
        slot.asked.remove(replacement)
        with _lock:
            slot.take_out()
