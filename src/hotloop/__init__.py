"""Hotloop makes the training step of a PyTorch program fast, and keeps it right.

Public names are loaded when they are first used: ``import hotloop`` costs no compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hotloop.version import __version__ as __version__

if TYPE_CHECKING:
    from hotloop import errors, events, presets, testing
    from hotloop.compiling import observe
    from hotloop.compiling.control import (
        ComponentStatus,
        Status,
        compile,  # noqa: A004 - torch's own name
        is_compiled,
        own,
        status,
        uncompile,
    )
    from hotloop.compiling.observe import watch
    from hotloop.presets import Preset
    from hotloop.prove.bench.bench import bench
    from hotloop.prove.bench.result import Bench
    from hotloop.prove.harness.harness import harness
    from hotloop.prove.harness.result import Harness
    from hotloop.prove.verify.verdict import Verdict
    from hotloop.prove.verify.verify import verify
    from hotloop.step import Loop, LoopStatus, Pad, Workload
    from hotloop.train.fold import Fold
    from hotloop.train.optimizing import Training
    from hotloop.train.parameters import Range, Search

_HOMES = {
    "Bench": "hotloop.prove.bench.result",
    "ComponentStatus": "hotloop.compiling.control",
    "Fold": "hotloop.train.fold",
    "Harness": "hotloop.prove.harness.result",
    "Loop": "hotloop.step",
    "LoopStatus": "hotloop.step",
    "Pad": "hotloop.step",
    "Preset": "hotloop.presets",
    "Range": "hotloop.train.parameters",
    "Search": "hotloop.train.parameters",
    "Status": "hotloop.compiling.control",
    "Training": "hotloop.train.optimizing",
    "Verdict": "hotloop.prove.verify.verdict",
    "Workload": "hotloop.step",
    "bench": "hotloop.prove.bench.bench",
    "compile": "hotloop.compiling.control",
    "harness": "hotloop.prove.harness.harness",
    "is_compiled": "hotloop.compiling.control",
    "own": "hotloop.compiling.control",
    "status": "hotloop.compiling.control",
    "uncompile": "hotloop.compiling.control",
    "verify": "hotloop.prove.verify.verify",
    "watch": "hotloop.compiling.observe",
}
_MODULES = {
    "errors": "hotloop.errors",
    "events": "hotloop.events",
    "observe": "hotloop.compiling.observe",
    "presets": "hotloop.presets",
    "testing": "hotloop.testing",
}

__all__ = [
    "Bench",
    "ComponentStatus",
    "Fold",
    "Harness",
    "Loop",
    "LoopStatus",
    "Pad",
    "Preset",
    "Range",
    "Search",
    "Status",
    "Training",
    "Verdict",
    "Workload",
    "bench",
    "compile",
    "errors",
    "events",
    "harness",
    "is_compiled",
    "observe",
    "own",
    "presets",
    "status",
    "testing",
    "uncompile",
    "verify",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hotloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
