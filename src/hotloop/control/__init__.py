"""Compile, uncompile, status: joins apply, observe and fallback."""

from hotloop.control.api import (
    Installed,
    compile,  # noqa: A004 - the public name is torch's own
    method_of,
    paused,
    status,
    uncompile,
    validate,
)
from hotloop.control.component_status import ComponentStatus, Status
from hotloop.control.lifetime import own
from hotloop.control.methods import MethodEntry, Note

__all__ = [
    "ComponentStatus",
    "Installed",
    "MethodEntry",
    "Note",
    "Status",
    "compile",
    "method_of",
    "own",
    "paused",
    "status",
    "uncompile",
    "validate",
]
