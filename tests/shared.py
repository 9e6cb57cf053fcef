"""What tests of several processes share: waiting until something is so, whether a process ended, and a port for a server."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from pathlib import Path


def once(condition, seconds=900):
    """Wait until something is so, and return it; a busy machine is slow at whatever it does."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"not so after {seconds} s"
        time.sleep(0.05)
    return found


def is_gone(pid: int) -> bool:
    """Return whether a process has ended; what nobody waits for stays in /proc, as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def free_port() -> int:
    """Return a port below those that the system gives to connections: a Ray that starts takes many of these."""
    for port in random.sample(range(20_000, 32_000), 100):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port")
