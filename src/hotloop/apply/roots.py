"""Root functions by what should share compiled code: trials and repeated instances do, unlike modules do not."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import root_function

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hotloop.events import FrameEager

_KEPT = 256
"""Roots kept for modules that no longer live, so that the next trial of a search finds its code."""


@dataclasses.dataclass(eq=False)
class Root:
    """A traced function with a code object of its own, and its compiled form (target first, then the arguments).

    ``full``: torch's recompile limit was reached, so that nothing new is compiled here. ``failures``: what tracing gave
    up, which the next component that shares the root must be told as well.
    """

    function: Callable[..., Any]
    compiled: Callable[..., Any]
    full: bool = False
    failures: list[FrameEager] = dataclasses.field(default_factory=list)


_roots: collections.OrderedDict[Hashable, Root] = collections.OrderedDict()
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


def root_for(  # noqa: PLR0913 - what a compile is keyed by
    target: Any,
    *,
    backend: Callable[..., Any],
    mode: str,
    dynamic: bool | None,
    fullgraph: bool,
    private_to: object = None,
) -> Root:
    """Give the root that ``target`` shares with its like, or with ``private_to`` one of its own, not kept."""
    name = type(target).__name__ if isinstance(target, torch.nn.Module) else getattr(target, "__name__", "function")
    if private_to is not None:
        return _make(name, target, backend, dynamic, fullgraph)
    key = (fingerprint(target), backend, mode, dynamic, fullgraph)
    with _lock:
        root = _roots.pop(key, None)
        if root is None or root.full:
            root = _make(name, target, backend, dynamic, fullgraph)
        _roots[key] = root
        while len(_roots) > _KEPT:
            _roots.popitem(last=False)
        return root


def _make(name: str, target: Any, backend: Callable[..., Any], dynamic: bool | None, fullgraph: bool) -> Root:
    function = root_function(name, target)
    return Root(function, torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=fullgraph))
