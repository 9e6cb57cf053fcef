"""Puts functions of ours in the place of torch's, for one thread and the backwards that it starts.

An attribute of a module or a class is the whole process's. So what is put there is one dispatcher, by the first thread
that asks, and taken off by the last; it gives each thread that asked its own replacement, and all others the real one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_KEY = "hotloop.replaced"
_ABSENT = object()
_lock = threading.Lock()
_of_thread = threading.local()
_slots: dict[tuple[int, str], _Slot] = {}
"""Kept for good: compiled code is guarded on the identity of a dispatcher that it was traced with."""


class _Slot:
    """One attribute, its dispatcher, and how many want it in place."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.wanted = owner, name, 0
        self.real: Callable[..., Any] = getattr(owner, name)
        self._own: Any = _ABSENT

        def dispatcher(*args: Any, **kwargs: Any) -> Any:
            mine = _mine().get(self)
            return (mine[-1] if mine else self.real)(*args, **kwargs)

        dispatcher.__name__ = name
        self.dispatcher = dispatcher

    def put_in(self, *, constant: bool) -> None:
        if constant and "torch._dynamo" in sys.modules:
            torch.compiler.assume_constant_result(self.dispatcher)  # else dynamo would trace into it, and break there
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


@contextlib.contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Any], *, constant: bool = False
) -> Iterator[None]:
    """Have ``make(real)`` called in the place of ``owner.name`` while the block runs.

    By this thread, and by the backwards that it starts in the block, which run in threads of torch's own on a GPU.

    Args:
        owner: a module or a class.
        name: a function or method of it.
        make: makes the replacement out of the real one.
        constant: what it answers may be burnt into compiled code.
    """
    with _lock:
        slot = _slots.get((id(owner), name)) or _slots.setdefault((id(owner), name), _Slot(owner, name))
        slot.put_in(constant=constant)
    mine = _own_table().setdefault(slot, [])
    mine.append(make(slot.real))
    try:
        yield
    finally:
        mine.pop()
        with _lock:
            slot.take_out()


def _own_table() -> dict[_Slot, list[Any]]:
    """Give this thread's replacements, and have torch hand them to the threads that run its backwards."""
    table: dict[_Slot, list[Any]] | None = getattr(_of_thread, "table", None)
    if table is None:
        table = _of_thread.table = {}
        with contextlib.suppress(CapabilityMissingError):
            private("torch._C:_stash_obj_in_tls")(_KEY, table)
    return table


def _mine() -> dict[_Slot, list[Any]]:
    table: dict[_Slot, list[Any]] | None = getattr(_of_thread, "table", None)
    if table is not None:
        return table
    try:
        if private("torch._C:_is_key_in_tls")(_KEY):
            of_caller: dict[_Slot, list[Any]] = private("torch._C:_get_obj_in_tls")(_KEY)
            return of_caller
    except CapabilityMissingError:
        pass
    return {}
