"""The small libraries by which torch finds out what the compiler and the processor can do together.

torch compiles about ten of them in every process that compiles for the CPU, which takes longer than all that a filled
store leaves to do. A broken one would say for good that the processor can do nothing, and no code would be vectorised:
so only those are kept that load here, in a process of their own, as torch itself will load them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = b"_chk_kernel"
"""In the names of their functions."""
_TIMEOUT_SECONDS = 60.0
_PROGRAM = """
import ctypes, sys
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path)
    except OSError:
        continue
    print(path, flush=True)
"""


def is_probe(library: bytes) -> bool:
    """Tell a probe from compiled code, by its content."""
    return _NAME in library


_answers: dict[tuple[int, int, int, int], bool] = {}
"""What was found out in this process, by the file that it was about."""


def loadable(paths: Iterable[Path]) -> set[Path]:
    """Give those that can be loaded; none where that cannot be found out. Each file is tried once in a process."""
    asked = {}
    for path in paths:
        with contextlib.suppress(OSError):  # it is gone meanwhile
            asked[path] = _identity(path)
    new = [path for path, file in asked.items() if file not in _answers]
    if new:
        loaded = _try(new)
        _answers.update({asked[path]: path in loaded for path in new})
    return {path for path, file in asked.items() if _answers[file]}


def _identity(path: Path) -> tuple[int, int, int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def _try(paths: Iterable[Path]) -> set[Path]:
    """Load all of them in one process; one that ends it leaves none."""
    asked = {str(path): path for path in paths}
    if not sys.executable:
        return set()
    try:
        done = subprocess.run(  # noqa: S603 - this very Python, and files of this process's own folder
            [sys.executable, "-I", "-S", "-c", _PROGRAM, *asked],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()
    return {asked[line] for line in done.stdout.splitlines() if line in asked} if done.returncode == 0 else set()


def _environment() -> dict[str, str]:
    """Give the environment in which the linker finds torch's own libraries, which the probes are linked to."""
    spec = importlib.util.find_spec("torch")
    found = [str(Path(place) / "lib") for place in (spec.submodule_search_locations or ())] if spec else []
    before = os.environ.get("LD_LIBRARY_PATH")
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*found, *([before] if before else [])])}
