"""Compile, uncompile, status: joins apply, observe and fallback."""

from hotloop.compiling.control.api import (
    compile,  # noqa: A004 - the public name is torch's own
    leave_eager,
    own,
    uncompile,
    validate,
)
from hotloop.compiling.control.boundary import between_steps
from hotloop.compiling.control.component_status import ComponentStatus, Status
from hotloop.compiling.control.installed import Installed, compiles, method_of, paused
from hotloop.compiling.control.methods import MethodEntry, Note
from hotloop.compiling.control.precompiled import AS_GIVEN, compiled_by_user, precompiled
from hotloop.compiling.control.statuses import is_compiled, status

__all__ = [
    "AS_GIVEN",
    "ComponentStatus",
    "Installed",
    "MethodEntry",
    "Note",
    "Status",
    "between_steps",
    "compile",
    "compiled_by_user",
    "compiles",
    "is_compiled",
    "leave_eager",
    "method_of",
    "own",
    "paused",
    "precompiled",
    "status",
    "uncompile",
    "validate",
]
