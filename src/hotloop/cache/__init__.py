"""What outlives a process: the costs of earlier runs, compiled code, and the child that compiles in the background.

Its names are loaded when they are first used: the files of this user (`hotloop.cache.files`) need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.cache.child_process import BackgroundCompile, BackgroundUnavailableError, Done, Failed
    from hotloop.cache.compiled import shared_compiles
    from hotloop.cache.costs import CostStore, TierCosts
    from hotloop.cache.keys import key_of
    from hotloop.cache.share import shared_cache

_HOMES = {
    "BackgroundCompile": "child_process",
    "BackgroundUnavailableError": "child_process",
    "CostStore": "costs",
    "Done": "child_process",
    "Failed": "child_process",
    "TierCosts": "costs",
    "key_of": "keys",
    "shared_cache": "share",
    "shared_compiles": "compiled",
}

__all__ = [
    "BackgroundCompile",
    "BackgroundUnavailableError",
    "CostStore",
    "Done",
    "Failed",
    "TierCosts",
    "key_of",
    "shared_cache",
    "shared_compiles",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hotloop.cache.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hotloop.cache' has no attribute {name!r}")
