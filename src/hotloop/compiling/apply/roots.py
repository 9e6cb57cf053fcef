"""Root functions by what should share compiled code: trials and repeated instances do, unlike modules do not."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import inlined_by, module_of, plain_call, root_function, settings_of
from hotloop.compiling.apply.sizes import first_tensor, mark_batch_dynamic
from hotloop.compiling.apply.targets import sharded_units

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hotloop.events import FrameEager

_OWN_SIZES = 2
"""Batch sizes of one target with code of their own: the full batch, and the short last one (or a trial call's)."""
_SIZES_KEPT = 16
"""Batch sizes whose code is kept for targets that are alike: a search may vary the size from trial to trial."""
_KEPT = 256
"""Roots kept for modules that no longer live, so that the next trial of a search finds its code."""


@dataclasses.dataclass(eq=False)
class Root:
    """A traced function with a code object of its own, and its compiled form (target first, then the arguments).

    ``full``: torch's recompile limit was reached, so that nothing new is compiled here. ``failures``: what tracing gave
    up, which the next component that shares the root must be told as well. ``open``: to batches of
    any size, which is made dynamic from its first compile on.
    """

    function: Callable[..., Any]
    compiled: Callable[..., Any]
    full: bool = False
    failures: list[FrameEager] = dataclasses.field(default_factory=list)
    open: bool = False


class Shared:
    """What targets that are alike share: one root for each batch size, and one for any size.

    Args:
        make: makes a root.
    """

    def __init__(self, make: Callable[[], Root]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._sizes: collections.OrderedDict[int | None, Root] = collections.OrderedDict()
        self._open: Root | None = None

    @property
    def full(self) -> bool:
        """Whether one of them has reached torch's recompile limit."""
        return any(root.full for root in (*self._sizes.values(), *([self._open] if self._open else [])))

    def of(self, size: int | None) -> Root:
        """Give the root of a batch size; None is that of calls without one."""
        with self._lock:
            root = self._sizes.pop(size, None) or self._make()
            self._sizes[size] = root
            while len(self._sizes) > _SIZES_KEPT:
                self._sizes.popitem(last=False)
            return root

    def open(self) -> Root:
        """Give the root that is for batches of any size."""
        with self._lock:
            if self._open is None:
                self._open = self._make()
                self._open.open = True
            return self._open


class Roots:
    """The roots of one target, which it shares with its like: one for each of its first batch sizes, one for further.

    Where one function saw two sizes, torch would compile it a second time with the size dynamic, and run the batches of
    the first size on that slower code as well, for good: one short last batch does that. With code of their own, full
    batches keep theirs. It also keeps torch's memory of sizes that have varied apart, which goes by code object. How
    many sizes have code of their own is counted by target: in a search over batch sizes each trial has one.

    Args:
        shared: the roots of all targets that are alike.
        by_size: whether batch sizes are told apart; not where the user decided on dynamic shapes.
    """

    def __init__(self, shared: Shared, *, by_size: bool) -> None:
        self._shared, self._by_size = shared, by_size
        self._lock = threading.Lock()
        self._rank: int | None = None
        self._plain: Root | None = None
        self._sizes: dict[int, Root] = {}
        self._further: Root | None = None

    def all(self) -> list[Root]:
        """Give the roots that the target has used."""
        found = [self._plain, *self._sizes.values(), self._further]
        return [root for root in found if root is not None]

    def _unsized(self) -> Root:
        """Give the root of calls whose batch size is not told apart."""
        if self._plain is None:
            self._plain = self._shared.of(None)
        return self._plain

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Give the root for a call, and where it is new and not the first, what differs, in torch's words."""
        if not self._by_size:
            return self._plain or self._unsized(), ""
        name, tensor = first_tensor(args, kwargs)
        if tensor is None or tensor.ndim != self._rank:
            if tensor is None or self._rank is not None:  # another kind of call: torch compiles it anew, static
                known = "" if self._plain or tensor is None else self._other_rank(name, tensor.ndim)
                return self._plain or self._unsized(), known
            self._rank = tensor.ndim
        size = tensor.shape[0]
        found = self._sizes.get(size)
        if found is not None:
            return found, ""
        with self._lock:
            return self._unseen(name, size, args, kwargs)

    def _other_rank(self, name: str, rank: int) -> str:
        """Say what differs from calls before, as torch says it."""
        return f"tensor '{name}' rank mismatch. expected {self._rank}, actual {rank}"

    def _unseen(self, name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        if (found := self._sizes.get(size)) is not None:  # another thread was first
            return found, ""
        differs = ""
        if len(self._sizes) < _OWN_SIZES:
            differs = self._differs(name, size) if self._sizes else ""
            self._sizes[size] = root = self._shared.of(size)
        elif self._further is None:
            root = self._further = self._shared.open()
            differs = self._differs(name, size)
        else:
            root = self._further
        if root.open:
            mark_batch_dynamic(args, kwargs, size)
        return root, differs

    def _differs(self, name: str, size: int) -> str:
        known = " or ".join(map(str, [one for one in self._sizes if one != size]))
        return f"tensor '{name}' size mismatch at index 0. expected {known}, actual {size}"


_roots: collections.OrderedDict[tuple[Hashable, ...], Shared] = collections.OrderedDict()
_lock = threading.Lock()


def fingerprint(target: Any) -> Hashable:
    """Give what makes two targets alike for compiled code: classes, their settings as printed, shapes and dtypes.

    A dropout probability is in the printed settings, or is an attribute by that name (transformers' attention keeps it
    so): each value gets code of its own, and no limit is shared.
    """
    module = module_of(target)
    if module is None:
        function = getattr(target, "__func__", target)
        shared: Hashable = getattr(function, "__code__", None)
        return (type(target), shared)
    parts = module.named_modules()
    # What cannot be read is unlike any.
    alike = tuple((name, type(part), *(settings_of(part) or ("unreadable", id(part)))) for name, part in parts)
    return alike if module is target else (target.name, alike)


def roots_for(  # noqa: PLR0913 - what a compile is keyed by
    target: Any,
    *,
    backend: Callable[..., Any],
    mode: str,
    dynamic: bool | None,
    fullgraph: bool,
    private_to: object = None,
) -> Roots:
    """Give the roots that ``target`` shares with its like, or with ``private_to`` some of its own, not kept."""
    name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
    module, inlined = isinstance(target, torch.nn.Module), inlined_by(target)
    sharded = module and bool(sharded_units(target))

    def make() -> Root:  # it outlives the target, which it must not hold
        function = root_function(name, module=module, inlined=inlined)
        if sharded:  # hooks that gather and free its parameters stay outside: dynamo compiles the forward between them
            return Root(function, torch.compile(plain_call(), backend=backend, dynamic=dynamic, fullgraph=fullgraph))
        return Root(function, torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph))

    if private_to is not None:
        return Roots(Shared(make), by_size=dynamic is None)
    key = (fingerprint(target), backend, mode, dynamic, fullgraph)
    with _lock:
        shared = _roots.pop(key, None)
        if shared is None or shared.full:
            shared = Shared(make)
        _roots[key] = shared
        while len(_roots) > _KEPT:
            _roots.popitem(last=False)
        return Roots(shared, by_size=dynamic is None)


def holds_code_for(target: Any) -> bool:
    """Tell whether this process still holds a root of targets like this one, so that another compiles nothing."""
    wanted = fingerprint(target)
    with _lock:
        return any(key[0] == wanted and not shared.full for key, shared in _roots.items())


def forget_roots() -> None:
    """Forget what modules share: the next one that is compiled gets code of its own, as the first of a process does."""
    with _lock:
        _roots.clear()
