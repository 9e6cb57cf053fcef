"""Root functions by what should share compiled code: trials and repeated instances do, unlike modules do not."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import inlined_by, root_function
from hotloop.apply.sizes import first_tensor, mark_batch_dynamic

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hotloop.events import FrameEager

_OWN_SIZES = 2
"""Batch sizes with code of their own: the full batch, and the short last one (or a trial call's)."""
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


class Roots:
    """The roots of all targets that share code: one for each of the first batch sizes, and one for all further ones.

    Where one function saw two sizes, torch would compile it a second time with the size dynamic, and run the batches of
    the first size on that slower code as well, for good: one short last batch does that. With code of their own, full
    batches keep theirs. It also keeps torch's memory of sizes that have varied apart, which goes by code object.

    Args:
        make: makes a root.
        by_size: whether batch sizes are told apart; not where the user decided on dynamic shapes.
    """

    def __init__(self, make: Callable[[], Root], *, by_size: bool) -> None:
        self._make, self._by_size = make, by_size
        self.first = make()
        self._lock = threading.Lock()
        self._rank: int | None = None
        self._sizes: dict[int, Root] = {}
        self._further: Root | None = None

    @property
    def full(self) -> bool:
        """Whether one of them has reached torch's recompile limit."""
        return any(root.full for root in self.all())

    def all(self) -> list[Root]:
        """Give the roots that there are."""
        others = [root for root in self._sizes.values() if root is not self.first]
        return [self.first, *others, *([self._further] if self._further else [])]

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        """Give the root for a call, and where it is new and not the first, what differs, in torch's words."""
        if not self._by_size:
            return self.first, ""
        name, tensor = first_tensor(args, kwargs)
        if tensor is None or tensor.ndim != self._rank:
            if tensor is None or self._rank is not None:  # another kind of call: torch compiles it anew, static
                return self.first, ""
            self._rank = tensor.ndim
        size = tensor.shape[0]
        found = self._sizes.get(size)
        if found is not None:
            return found, ""
        with self._lock:
            return self._unseen(name, size, args, kwargs)

    def _unseen(self, name: str, size: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Root, str]:
        if (found := self._sizes.get(size)) is not None:  # another thread was first
            return found, ""
        if not self._sizes:
            self._sizes[size] = self.first
            return self.first, ""
        differs = ""
        if len(self._sizes) < _OWN_SIZES:
            self._sizes[size] = root = self._make()
            differs = self._differs(name, size)
        elif self._further is None:
            root = self._further = self._make()
            root.open = True
            differs = self._differs(name, size)
        else:
            root = self._further
        if root.open:
            mark_batch_dynamic(args, kwargs, size)
        return root, differs

    def _differs(self, name: str, size: int) -> str:
        known = " or ".join(map(str, [one for one in self._sizes if one != size]))
        return f"tensor '{name}' size mismatch at index 0. expected {known}, actual {size}"


_roots: collections.OrderedDict[Hashable, Roots] = collections.OrderedDict()
_lock = threading.Lock()


def fingerprint(target: Any) -> Hashable:
    """Give what makes two targets alike for compiled code: classes, their settings as printed, shapes and dtypes.

    A dropout probability is in the printed settings: each value gets code of its own, and no limit is shared.
    """
    if not isinstance(target, torch.nn.Module):
        function = getattr(target, "__func__", target)
        shared: Hashable = getattr(function, "__code__", None)
        return (type(target), shared)
    return tuple((name, type(module), *_settings(module)) for name, module in target.named_modules())


def _settings(module: torch.nn.Module) -> tuple[Hashable, ...]:
    """Give a module's settings as printed and its tensors' shapes.

    Where either cannot be read, the module is unlike any: lazy parameters have no shape yet, and ``extra_repr`` is the
    user's code.
    """
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    try:
        return module.extra_repr(), tuple((key, tuple(tensor.shape), tensor.dtype) for key, tensor in own)
    except Exception:  # noqa: BLE001 - whatever it raises, it must not end the run
        return ("unreadable", id(module))


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

    def make() -> Root:  # it outlives the target, which it must not hold
        function = root_function(name, module=module, inlined=inlined)
        return Root(function, torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph))

    if private_to is not None:
        return Roots(make, by_size=dynamic is None)
    key = (fingerprint(target), backend, mode, dynamic, fullgraph)
    with _lock:
        roots = _roots.pop(key, None)
        if roots is None or roots.full:
            roots = Roots(make, by_size=dynamic is None)
        _roots[key] = roots
        while len(_roots) > _KEPT:
            _roots.popitem(last=False)
        return roots


def forget_roots() -> None:
    """Forget what modules share: the next one that is compiled gets code of its own, as the first of a process does."""
    with _lock:
        _roots.clear()
