"""The installed version of torch, and whether hotloop supports it."""

from __future__ import annotations

import functools
import logging
import re

from hotloop.errors import UnsupportedTorchError

OLDEST, NEWEST = (2, 11), (2, 15)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
"""The versions of torch that hotloop is tested on, for messages; pages and `make matrix` name the same."""


def parse(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version like ``2.13.0+cpu`` or ``2.14.0a0+git``.

    Raises:
        UnsupportedTorchError: it does not start with two numbers.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise UnsupportedTorchError(f"torch has version {version!r}: expected one that starts like 2.13")
    return int(found[1]), int(found[2])


@functools.cache
def check() -> tuple[int, int]:
    """Return the installed torch's (major, minor); warn once if it is newer than the versions that were tested.

    Raises:
        UnsupportedTorchError: torch is older than hotloop supports.
    """
    import torch  # noqa: PLC0415 - this room is imported by code that must not cost torch until it is used

    found = parse(torch.__version__)
    if found < OLDEST:
        raise UnsupportedTorchError(
            f"hotloop needs torch {TESTED}, found {torch.__version__}: pip install 'torch>={OLDEST[0]}.{OLDEST[1]}'"
        )
    if found > NEWEST:
        logging.getLogger("hotloop").warning(
            "hotloop was tested on torch %s; this is %s. What this torch lacks runs eager and says so.",
            TESTED,
            torch.__version__,
        )
    return found
