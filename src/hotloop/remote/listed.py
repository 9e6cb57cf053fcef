"""The list of a run's files that its job signs: which names and sizes it may have, there and here."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from hotloop.errors import DataError
from hotloop.report.runs import FETCHED

COMPILED, INDEX, LOG = "compiled", "index.json", "submit-log.txt"
MOST_BYTES = 2**24
"""Of the list itself: that of a hundred thousand files."""
_OWN = (".", "run.lock", "stored.json", "ui-")
"""How files of one machine begin: they say what happens there, and would be taken for what happens here."""
_FETCHES = (LOG, FETCHED)
"""Files that a fetch writes itself."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_NAME, _MOST_PART = 1000, 240


def is_name(run: str, name: object) -> bool:
    """Return whether a file of a run may have this path."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name or len(name) > _MOST_NAME:
        return False
    path = PurePosixPath(name)
    return (
        len(path.parts) > 1
        and path.parts[0] in (run, COMPILED)
        and ".." not in path.parts
        and all(len(one.encode(errors="replace")) <= _MOST_PART for one in path.parts)
        and not path.name.startswith(_OWN)
        and path.name not in _FETCHES
        and path.suffix != ".db-shm"  # the memory that processes of one machine share
    )


def checked(run: str, document: Any) -> tuple[dict[str, tuple[int, str]], dict[str, Any]]:
    """Return the files of a list, each with its size and checksum, and what the job says of itself.

    Raises:
        DataError: the list cannot be one of ours.
    """
    try:
        files, state = dict(document["files"]), dict(document["state"])
        found = {name: (size, digest) for name, (size, digest) in files.items()}
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(f"the list of run {run} is none; nothing is taken") from error
    for name, (size, digest) in found.items():
        if not is_name(run, name):
            raise DataError(f"run {run} names a file that cannot be: {str(name)[:300]!r}; nothing is taken")
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise DataError(f"run {run} says of {name} what cannot be: {str((size, digest))[:300]}; nothing is taken")
    return found, state
