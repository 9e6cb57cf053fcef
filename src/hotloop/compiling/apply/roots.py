"""Root functions by what should share compiled code: trials and repeated instances do, unlike modules do not."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import mark_dynamic
from hotloop._torch.module import Inlined, module_of, plain_call, root_function, settings_of
from hotloop.compiling.apply.targets import sharded_units

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from hotloop.events import FrameEager

_KEPT = 256
"""Roots kept for modules that no longer live, so that the next trial of a search finds its code."""
_roots: collections.OrderedDict[tuple[Hashable, ...], SharedRoots] = collections.OrderedDict()
_lock = threading.Lock()


@dataclasses.dataclass(eq=False)
class Root:
    """A traced function with a code object of its own, and its compiled form (target first, then the arguments)."""

    function: Callable[..., Any]
    compiled: Callable[..., Any]
    full: bool = False
    """torch's recompile limit was reached, so that nothing new is compiled here."""
    recomputed: int = 0
    """How often it was compiled in the recomputation of a checkpointed forward."""
    failures: list[FrameEager] = dataclasses.field(default_factory=list)
    """What tracing gave up; the next component that shares the root reports it as well."""
    in_parts: bool = False
    """Python runs between its graphs."""
    sharded: bool = False
    """It calls a module of FSDP2's, whose hooks stay outside."""
    open: bool = False
    """Takes batches of any size: the size is made dynamic from the first compile on."""


class SharedRoots:
    """The roots that equal targets share: one for each batch size, and one for any size.

    Args:
        make: makes a root.
    """

    _SIZES = 16
    """Batch sizes whose code is kept: a search may vary the size from trial to trial."""

    def __init__(self, make: Callable[[], Root]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._sizes: collections.OrderedDict[int | None, Root] = collections.OrderedDict()
        self._open: Root | None = None

    @property
    def full(self) -> bool:
        """Whether one of the roots has reached torch's recompile limit."""
        return any(root.full for root in (*self._sizes.values(), *([self._open] if self._open else [])))

    def of(self, size: int | None) -> Root:
        """Return the root of a batch size; None stands for calls whose size does not matter."""
        with self._lock:
            root = self._sizes.pop(size, None) or self._make()
            self._sizes[size] = root
            while len(self._sizes) > self._SIZES:
                self._sizes.popitem(last=False)
            return root

    def open(self) -> Root:
        """Return the root for batches of any size."""
        with self._lock:
            if self._open is None:
                self._open = self._make()
                self._open.open = True
            return self._open


class Roots:
    """The roots of one target, shared with equal targets: one for each of its first batch sizes, one for all others.

    Where one function saw two sizes, torch would compile it a second time with the size dynamic, and run the batches of
    the first size on that slower code as well, for good: one short last batch does that. With code of their own, full
    batches keep theirs. Code objects of their own also keep torch's memory of varying sizes apart. How many sizes have
    code of their own is counted by target: in a search over batch sizes each trial has one.

    Args:
        shared: the roots of all equal targets.
        by_size: whether batch sizes get code of their own; False where the user decided on dynamic shapes.
    """

    _OWN_SIZES = 2
    """Batch sizes of one target with code of their own: the full batch, and the short last one (or a trial call's)."""

    def __init__(self, shared: SharedRoots, *, by_size: bool) -> None:
        self._shared, self._by_size = shared, by_size
        self._lock = threading.Lock()
        self._rank: int | None = None
        self._plain: Root | None = None
        self._sizes: dict[int, Root] = {}
        self._further: Root | None = None

    def all(self) -> list[Root]:
        """Return the roots that the target has used."""
        return [root for root in (self._plain, *self._sizes.values(), self._further) if root is not None]

    def _unsized(self) -> Root:
        """Return the root of calls whose batch size does not matter."""
        if self._plain is None:
            self._plain = self._shared.of(None)
        return self._plain

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Return the root for a call, and what differs, in torch's words, where the root is new and not the first."""
        if not self._by_size:
            return self._plain or self._unsized(), ""
        name, tensor = _first_tensor(args, kwargs)
        if tensor is None:
            return self._plain or self._unsized(), ""
        if tensor.ndim != self._rank:
            if self._rank is not None:  # another kind of call: torch compiles it anew, static
                mismatch = f"tensor '{name}' rank mismatch. expected {self._rank}, actual {tensor.ndim}"
                differs = "" if self._plain else mismatch
                return self._plain or self._unsized(), differs
            self._rank = tensor.ndim
        size = tensor.shape[0]
        known = self._sizes.get(size)
        if known is not None:
            return known, ""
        with self._lock:
            return self._unseen(name, size, args, kwargs)

    def _unseen(self, name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Return the root for a batch size that has no code of its own yet; see `of`."""
        if (root := self._sizes.get(size)) is not None:  # another thread was first
            return root, ""
        known = " or ".join(map(str, self._sizes))
        differs = f"tensor '{name}' size mismatch at index 0. expected {known}, actual {size}" if known else ""
        if len(self._sizes) < self._OWN_SIZES:
            self._sizes[size] = root = self._shared.of(size)
        elif self._further is None:
            root = self._further = self._shared.open()
        else:
            root, differs = self._further, ""
        for _, tensor in _tensors(args, kwargs) if root.open else ():
            if tensor.ndim and tensor.shape[0] == size:  # the batch, so that it is compiled for any size
                mark_dynamic(tensor, 0)
        return root, differs


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Return the first tensor of a call that has dimensions, with its name in dynamo's words; ("", None) without one.

    It runs at every call of compiled code: 0.1 us for a tensor as first argument.
    """
    if args and type(args[0]) is torch.Tensor and args[0].ndim:
        return "args[0]", args[0]
    for name, tensor in _tensors(args, kwargs):
        if tensor.ndim:
            return name, tensor
    return "", None


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call with their names; in nested arguments those one level down."""
    arguments: list[tuple[str, Any, Any]] = [("args", place, value) for place, value in enumerate(args)]
    arguments += [("kwargs", key, value) for key, value in kwargs.items()]
    for kind, key, value in arguments:
        if isinstance(value, torch.Tensor):
            yield f"{kind}[{key!r}]", value
        elif isinstance(value, Mapping | list | tuple):
            entries: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
            for inner, entry in entries:
                if isinstance(entry, torch.Tensor):
                    yield f"{kind}[{key!r}][{inner!r}]", entry


def fingerprint(target: Any) -> Hashable:
    """Return a key that targets with the same compiled code share: classes, settings as printed, shapes and dtypes.

    A dropout probability is in the printed settings, or is an attribute by that name (transformers' attention keeps it
    so): each value gets code of its own, and no limit is shared.
    """
    module = module_of(target)
    if module is None:
        function = getattr(target, "__func__", target)
        shared: Hashable = getattr(function, "__code__", None)
        return (type(target), shared)
    # Settings that cannot be read equal no others.
    key = tuple(
        (name, type(part), *(settings_of(part) or ("unreadable", id(part)))) for name, part in module.named_modules()
    )
    return key if module is target else (target.name, key)


def roots_for(  # noqa: PLR0913 - what a compile is keyed by
    target: Any,
    *,
    backend: Callable[..., Any],
    mode: str,
    dynamic: bool | None,
    fullgraph: bool,
    private_to: object = None,
) -> Roots:
    """Return the roots that ``target`` shares with equal targets; for ``private_to`` roots of its own, not kept."""
    name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
    module, inlined = isinstance(target, torch.nn.Module), Inlined.of(target)
    sharded = module and bool(sharded_units(target))

    def make() -> Root:  # it outlives the target, which it must not hold
        function = root_function(name, module=module, inlined=inlined)
        # FSDP's hooks, which gather and free parameters, stay outside: dynamo compiles the forward between them.
        traced = plain_call() if sharded else function
        compiled = torch.compile(traced, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
        return Root(function, compiled, sharded=sharded)

    if private_to is not None:
        return Roots(SharedRoots(make), by_size=dynamic is None)
    key = (fingerprint(target), backend, mode, dynamic, fullgraph)
    with _lock:
        shared = _roots.pop(key, None)
        if shared is None or shared.full:
            shared = SharedRoots(make)
        _roots[key] = shared
        while len(_roots) > _KEPT:
            _roots.popitem(last=False)
        return Roots(shared, by_size=dynamic is None)


def holds_code_for(target: Any) -> bool:
    """Return whether this process still holds a root of equal targets, so that compiling this one costs nothing."""
    wanted = fingerprint(target)
    with _lock:
        return any(key[0] == wanted and not shared.full for key, shared in _roots.items())


def forget_roots() -> None:
    """Forget the shared roots: the next module that is compiled gets code of its own, as the first of a process."""
    with _lock:
        _roots.clear()
