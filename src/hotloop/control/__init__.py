"""Compile, uncompile, status: joins apply, observe and fallback."""

from hotloop.control.api import (
    Installed,
    compile,  # noqa: A004 - the public name is torch's own
    paused,
    status,
    uncompile,
    validate,
)
from hotloop.control.component_status import ComponentStatus, Status
from hotloop.control.lifetime import own

__all__ = ["ComponentStatus", "Installed", "Status", "compile", "own", "paused", "status", "uncompile", "validate"]
