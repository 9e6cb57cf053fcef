"""The process behind a record, identified by its number, its machine and its start: whether it still runs."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

SUBMITTED = "HOTLOOP_SUBMITTED"
"""The variable that has the name of a run in the jobs that `hotloop submit` starts for it on a cluster."""
_NAME = re.compile(r"[0-9a-f-]{1,40}")


def was_killed(document: Mapping[str, Any]) -> bool:
    """Return whether a record says ``running`` although its process is gone; False if unknown (another machine)."""
    pid = document.get("pid")
    if document.get("status") != "running" or type(pid) is not int or pid <= 0 or on_cluster(document):
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


def on_cluster(document: Mapping[str, Any]) -> str:
    """Return the name of the run that a record's process belongs to on a cluster; empty where it is of this machine.

    The hosts alone do not distinguish them: containers often have the same name.
    """
    name = document.get("submitted")
    ours = os.environ.get(SUBMITTED)
    return name if isinstance(name, str) and name != ours and _NAME.fullmatch(name) else ""


def this_process() -> dict[str, Any]:
    """Return what distinguishes this process from all others: its number, its machine, and when it started.

    ``submitted`` names the run whose job on a cluster the process belongs to; None where it belongs to none.
    """
    pid = os.getpid()
    where = {"host": platform.node(), "submitted": os.environ.get(SUBMITTED)}
    return {"pid": pid, **where, "process_started": started(pid)}


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot (Linux only); numbers of processes are reused."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(fields.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
