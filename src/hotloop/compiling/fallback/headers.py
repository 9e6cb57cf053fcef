"""A precompiled header that a killed compiler left half-written: every later compile would fail on it, in any process.

torch keeps the header of its C++ code precompiled in its own temporary folder, where the compiler writes it in place,
and torch takes a file that is there for whole. It is an entry of a cache, so that a broken one is a miss: it is
removed, and the code that failed is compiled again, once, without it. The next process makes it anew.
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

_BLAMED = re.compile(rb"\bPCH\b|precompiled (header|file)", re.IGNORECASE)
_log = logging.getLogger("hotloop")


def removed(error: BaseException) -> bool:
    """Remove the precompiled header that a compile failed on; return whether there was one, so another try helps."""
    for link in chain_of(error):
        if not isinstance(link, subprocess.CalledProcessError) or not isinstance(link.cmd, list | tuple):
            continue
        output = link.stdout if isinstance(link.stdout, bytes) else str(link.stdout).encode()
        if _BLAMED.search(output):
            return _remove_included([str(word) for word in link.cmd])
    return False


def _remove_included(command: list[str]) -> bool:
    """Remove the precompiled form of the headers in torch's folder that a compiler's command includes first.

    The headers themselves stay, and serve as well. torch also remembers the libraries that failed, and has to forget
    them for another try.
    """
    gone = False
    for flag, word in itertools.pairwise(command):
        header = Path(word)
        if flag != "-include" or header.parent.name != "precompiled_headers":
            continue
        for suffix in (".gch", ".pch"):
            with contextlib.suppress(OSError):
                header.with_name(header.name + suffix).unlink()
                _log.warning("the precompiled header %s%s is broken and was removed; it is made anew", header, suffix)
                gone = True
    if not gone:
        return False
    try:
        forget_failed_libraries()
    except CapabilityMissingError:
        return False
    return True
