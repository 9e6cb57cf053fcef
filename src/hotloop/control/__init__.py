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

__all__ = ["ComponentStatus", "Installed", "Status", "compile", "paused", "status", "uncompile", "validate"]
