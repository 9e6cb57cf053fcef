"""A precompiled header that a killed compiler left half-written: every later compile would fail on it, in any process.

torch keeps the header of its C++ code precompiled in its own temporary folder, where the compiler writes it in place,
and torch takes what is there for whole. It is an entry of a cache, so that a broken one is a miss: it is removed, and
what failed is compiled again, once, without it. The next process makes it anew.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import subprocess
from pathlib import Path

from hotloop._torch.backends import forget_failed_libraries
from hotloop._torch.ledger import CapabilityMissingError
from hotloop.compiling.fallback.causes import chain_of

_FOLDER = "precompiled_headers"
_SUFFIXES = (".gch", ".pch")
_BLAMED = re.compile(rb"\bPCH\b|precompiled (header|file)", re.IGNORECASE)
_log = logging.getLogger("hotloop")


def removed(error: BaseException) -> bool:
    """Remove the precompiled header that a compile failed on; tells whether there was one, so another try helps."""
    for one in chain_of(error):
        if not isinstance(one, subprocess.CalledProcessError) or not isinstance(one.cmd, list | tuple):
            continue
        said = one.stdout if isinstance(one.stdout, bytes) else str(one.stdout).encode()
        if _BLAMED.search(said):
            return any(list(map(_remove, _headers(one.cmd)))) and _forgotten()
    return False


def _headers(command: list[str] | tuple[str, ...]) -> list[Path]:
    """Give the headers of torch's folder that a command of the compiler includes first."""
    words = [str(word) for word in command]
    found = [Path(word) for flag, word in itertools.pairwise(words) if flag == "-include"]
    return [header for header in found if header.parent.name == _FOLDER]


def _remove(header: Path) -> bool:
    """Remove what was precompiled of a header; the header itself stays, and does as well."""
    gone = False
    for suffix in _SUFFIXES:
        path = header.with_name(header.name + suffix)
        with contextlib.suppress(OSError):
            path.unlink()
            _log.warning("the precompiled header %s is broken and was removed; it is made anew", path)
            gone = True
    return gone


def _forgotten() -> bool:
    """Have torch forget the libraries that it could not compile."""
    try:
        forget_failed_libraries()
    except CapabilityMissingError:
        return False
    return True
