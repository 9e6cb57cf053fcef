"""The process behind a record, identified by its number, its machine and its start: whether it still runs."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def was_killed(document: Mapping[str, Any]) -> bool:
    """Return whether a record says ``running`` although its process is gone; False if unknown (another machine)."""
    pid = document.get("pid")
    if document.get("status") != "running" or type(pid) is not int or pid <= 0:
        return False
    if document.get("host") not in {None, platform.node()} or os.name == "nt":  # on Windows, os.kill(pid, 0) would kill
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return document.get("process_started") != started(pid)  # another process may have got the number since


def this_process() -> dict[str, Any]:
    """Return what distinguishes this process from all others: its number, its machine, and when it started."""
    pid = os.getpid()
    return {"pid": pid, "host": platform.node(), "process_started": started(pid)}


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot (Linux only); numbers of processes are reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(fields.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
