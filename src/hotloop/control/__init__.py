"""Compile, uncompile, status: joins apply, observe and fallback."""

from hotloop.control.api import compile, paused, status, uncompile, validate  # noqa: A004 - the public name is torch's own
from hotloop.control.component_status import ComponentStatus, Status

__all__ = ["ComponentStatus", "Status", "compile", "paused", "status", "uncompile", "validate"]
