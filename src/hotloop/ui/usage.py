"""What runs take of this machine now: GPUs as ``nvidia-smi`` tells them, and the memory of a process."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import threading
import time
from pathlib import Path

FRESH_SECONDS = 5.0
"""How old an answer may be: asking takes some hundredths of a second."""
_AGAIN_SECONDS = 60.0
"""When a program that failed or hung is asked again."""
_LONGEST_SECONDS = 5.0
_FACTS = "index,name,utilization.gpu,memory.used,memory.total"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU now; what the driver does not tell is None.

    Args:
        index, name: as the driver numbers and names it.
        busy: the share of the last moments in which a kernel ran.
        used, total: bytes of its memory, by all programs.
    """

    index: str
    name: str
    busy: float | None
    used: float | None
    total: float | None


class Gpus:
    """Asks the driver for all who watch; several threads may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0.0
        self._found: list[Gpu] = []

    def look(self) -> list[Gpu]:
        """Return the GPUs of this machine; none where there is no driver, or where it does not answer."""
        with self._lock:
            if time.monotonic() >= self._next:
                self._found, wait = _ask()
                self._next = time.monotonic() + wait
            return self._found


def _ask() -> tuple[list[Gpu], float]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], _AGAIN_SECONDS
    try:
        done = subprocess.run(  # noqa: S603 - the driver's own program, without a shell
            [program, f"--query-gpu={_FACTS}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return [], _AGAIN_SECONDS
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return [found for one in lines if (found := _gpu(one))], FRESH_SECONDS


def _gpu(line: str) -> Gpu | None:
    parts = [one.strip() for one in line.split(",")]
    if len(parts) != len(_FACTS.split(",")):
        return None
    busy, used, total = map(_number, parts[2:])
    share = busy / 100 if busy is not None else None
    return Gpu(parts[0], parts[1], share, used and used * 2**20, total and total * 2**20)


def _number(text: str) -> float | None:
    return float(text) if text.isascii() and text.replace(".", "", 1).isdigit() else None


def memory(pid: int) -> int | None:
    """Return the bytes of memory that a process holds (Linux), or None where that is not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = next((one.split()[1] for one in lines if one.startswith("VmRSS:")), "")
    return int(found) * 1024 if found.isdigit() else None
