"""Hotloop makes the training step of a PyTorch program fast, and keeps it right.

Public names are loaded when they are first used: ``import hotloop`` costs no compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop import errors, events, observe, presets, testing
    from hotloop.control import (
        ComponentStatus,
        Status,
        compile,  # noqa: A004 - torch's own name
        own,
        status,
        uncompile,
    )
    from hotloop.observe import watch
    from hotloop.presets import Preset
    from hotloop.prove.bench import bench
    from hotloop.prove.bench_result import Bench
    from hotloop.prove.harness import harness
    from hotloop.prove.harness_result import Harness
    from hotloop.prove.verify import verify
    from hotloop.prove.verify_verdict import Verdict
    from hotloop.step import Loop, LoopStatus, Pad, Workload

__version__ = "0.1.0"

_HOMES = {
    "Bench": "hotloop.prove.bench_result",
    "ComponentStatus": "hotloop.control",
    "Harness": "hotloop.prove.harness_result",
    "Loop": "hotloop.step",
    "LoopStatus": "hotloop.step",
    "Pad": "hotloop.step",
    "Preset": "hotloop.presets",
    "Status": "hotloop.control",
    "Verdict": "hotloop.prove.verify_verdict",
    "Workload": "hotloop.step",
    "bench": "hotloop.prove.bench",
    "compile": "hotloop.control",
    "harness": "hotloop.prove.harness",
    "own": "hotloop.control",
    "status": "hotloop.control",
    "uncompile": "hotloop.control",
    "verify": "hotloop.prove.verify",
    "watch": "hotloop.observe",
}
_MODULES = ("errors", "events", "observe", "presets", "testing")

__all__ = [
    "Bench",
    "ComponentStatus",
    "Harness",
    "Loop",
    "LoopStatus",
    "Pad",
    "Preset",
    "Status",
    "Verdict",
    "Workload",
    "bench",
    "compile",
    "errors",
    "events",
    "harness",
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
        return importlib.import_module(f"hotloop.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hotloop' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
