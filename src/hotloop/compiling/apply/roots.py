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
"""Keys whose roots are kept, so that the next trial of a search finds its code."""
_SIZES = 16
"""Batch sizes whose code equal targets keep: a search may vary the size from trial to trial."""
_OWN_SIZES = 2
"""Batch sizes of one target with code of their own: the full batch, and the short last one (or a trial call's)."""
_shared: collections.OrderedDict[tuple[Hashable, ...], _Shared] = collections.OrderedDict()
_lock = threading.RLock()


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


class _Shared:
    """The roots that equal targets share, by batch size; None is for calls whose size does not matter."""

    def __init__(self, make: Callable[[], Root]) -> None:
        self._make = make
        self._roots: collections.OrderedDict[int | str | None, Root] = collections.OrderedDict()

    @property
    def full(self) -> bool:
        return any(root.full for root in self._roots.values())

    def of(self, size: int | str | None) -> Root:
        with _lock:
            root = self._roots.pop(size, None) or self._make()
            self._roots[size] = root
            while len(self._roots) > _SIZES:
                self._roots.popitem(last=False)
            return root


class Roots:
    """The roots of one target, shared with equal targets: one for each of its first batch sizes, one for all others.

    Where one function saw two sizes, torch would compile it a second time with the size dynamic, and run the batches of
    the first size on that slower code as well, for good: one short last batch does that.

    Args:
        shared: the roots of all equal targets.
        by_size: whether batch sizes get code of their own; False where the user decided on dynamic shapes.
    """

    def __init__(self, shared: _Shared, *, by_size: bool) -> None:
        self._shared, self._by_size = shared, by_size
        self._rank: int | None = None
        self._roots: dict[int | str | None, Root] = {}

    def used(self) -> int:
        """Return the number of roots that the target has used."""
        return len(self._roots)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Return the root for a call, and what differs, in torch's words, where the root is new and not the first."""
        name, tensor = _first_tensor(args, kwargs) if self._by_size else ("", None)
        if tensor is None:
            return self._root(None), ""
        if self._rank is None:
            self._rank = tensor.ndim
        if tensor.ndim != self._rank:  # another kind of call: torch compiles it anew, static
            differs = f"tensor '{name}' rank mismatch. expected {self._rank}, actual {tensor.ndim}"
            differs = "" if None in self._roots else differs
            return self._root(None), differs
        size = tensor.shape[0]
        if (known := self._roots.get(size)) is not None:
            return known, ""
        with _lock:
            return self._unseen(name, size, args, kwargs)

    def _root(self, size: int | str | None) -> Root:
        if size not in self._roots:
            self._roots[size] = self._shared.of(size)
        return self._roots[size]

    def _unseen(self, name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Return the root for a batch size that has no code of its own yet; see `of`."""
        sizes = [known for known in self._roots if isinstance(known, int)]
        expected = " or ".join(map(str, sizes))
        differs = f"tensor '{name}' size mismatch at index 0. expected {expected}, actual {size}" if sizes else ""
        if len(sizes) < _OWN_SIZES:
            return self._root(size), differs
        differs = "" if "any" in self._roots else differs
        for _, tensor in _tensors(args, kwargs):
            if tensor.ndim and tensor.shape[0] == size:  # the batch, so that it is compiled for any size
                mark_dynamic(tensor, 0)
        return self._root("any"), differs


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Return the first tensor of a call that has dimensions, with its name in dynamo's words; ("", None) without one.

    It runs at every call of compiled code: 0.1 us for a tensor as first argument.
    """
    if args and type(args[0]) is torch.Tensor and args[0].ndim:
        return "args[0]", args[0]
    return next(((name, tensor) for name, tensor in _tensors(args, kwargs) if tensor.ndim), ("", None))


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call with their names; in nested arguments those one level down."""
    for kind, values in (("args", enumerate(args)), ("kwargs", kwargs.items())):
        for key, value in values:
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
        return type(target), getattr(function, "__code__", None)
    # Settings that cannot be read equal no others.
    key = tuple(
        (name, type(part), *(settings_of(part) or ("unreadable", id(part)))) for name, part in module.named_modules()
    )
    return key if module is target else (target.name, key)


def roots_for(target: Any, *, backend: Callable[..., Any], mode: str, dynamic: bool | None, fullgraph: bool) -> Roots:
    """Return the roots that ``target`` shares with equal targets."""
    name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
    module, inlined = isinstance(target, torch.nn.Module), Inlined.of(target)
    sharded = module and bool(sharded_units(target))

    def make() -> Root:  # it outlives the target, which it must not hold
        function = root_function(name, module=module, inlined=inlined)
        # FSDP's hooks, which gather and free parameters, stay outside: dynamo compiles the forward between them.
        traced = plain_call() if sharded else function
        compiled = torch.compile(traced, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
        return Root(function, compiled, sharded=sharded)

    key = (fingerprint(target), backend, mode, dynamic, fullgraph)
    with _lock:
        shared = _shared.pop(key, None)
        if shared is None or shared.full:
            shared = _Shared(make)
        _shared[key] = shared
        while len(_shared) > _KEPT:
            _shared.popitem(last=False)
        return Roots(shared, by_size=dynamic is None)


def holds_code_for(target: Any) -> bool:
    """Return whether this process still holds a root of equal targets, so that compiling this one costs nothing."""
    wanted = fingerprint(target)
    with _lock:
        return any(key[0] == wanted and not shared.full for key, shared in _shared.items())


def forget_roots() -> None:
    """Forget the shared roots: the next module that is compiled gets code of its own, as the first of a process."""
    with _lock:
        _shared.clear()
