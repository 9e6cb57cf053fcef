"""Compile, uncompile, status: joins apply, observe and fallback."""

from hotloop.control.api import (
    compile,  # noqa: A004 - the public name is torch's own
    leave_eager,
    uncompile,
    validate,
)
from hotloop.control.boundary import between_steps
from hotloop.control.component_status import ComponentStatus, Status
from hotloop.control.given import AS_GIVEN, compiled_by_user, given
from hotloop.control.installed import Installed, compiles, method_of, paused
from hotloop.control.lifetime import own
from hotloop.control.methods import MethodEntry, Note
from hotloop.control.statuses import status

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
    "given",
    "leave_eager",
    "method_of",
    "own",
    "paused",
    "status",
    "uncompile",
    "validate",
]
