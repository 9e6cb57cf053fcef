"""The threads of this process that train at present: one alone may prove and capture its steps.

Random streams are the process's: a proof puts them back, under the other's hands. And while a GPU's stream is captured,
torch (2.11) refuses numbers of that GPU to everybody else, so that the other thread's dropout would raise.
"""

from __future__ import annotations

import threading
import time

_RECENTLY = 5.0
"""Seconds since its last step after which a thread is not taken to train any more, though it is alive."""
_BUSY = float("inf")

_last: dict[int, tuple[int, float]] = {}
"""By thread: whose its last step was, and when that ended; infinite while it runs."""

WAITS = (
    "another thread of this process trains at the same time, and random streams and a capture are the whole process's: "
    "steps run as they are until it is done. Train in processes, one each (Optuna: n_jobs=1 in each of several)"
)


def begins(owner: object) -> None:
    """Note that a step begins in this thread; ``owner`` is the context of its loop."""
    _last[threading.get_ident()] = id(owner), _BUSY


def ended(owner: object) -> None:
    """Note that the step has ended."""
    _last[threading.get_ident()] = id(owner), time.monotonic()


def seen() -> None:
    """Note that this thread trains without a loop, as was seen by its optimizer."""
    _last[threading.get_ident()] = 0, time.monotonic()


def another_trains(owner: object) -> bool:
    """Return whether another thread is in a training step of another owner, or was a moment ago.

    Steps of one loop may be called in one thread after the other (``asyncio.to_thread``).
    """
    if len(_last) == 1:  # of this thread
        return False
    alive, now = {thread.ident for thread in threading.enumerate()}, time.monotonic()
    for thread in [thread for thread in _last if thread not in alive]:
        _last.pop(thread, None)
    own = threading.get_ident()
    return any(
        thread != own and whose != id(owner) and last > now - _RECENTLY for thread, (whose, last) in [*_last.items()]
    )
