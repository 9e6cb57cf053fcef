"""Finishes the record of a loop that nobody closed: when it is collected, or when its process ends."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.step.loop.account import Account

_log = logging.getLogger("hotloop")
_EARLIER = "_hotloop_is_earlier"
"""The attribute of an exception that was shown before a loop was made: the program went on after it."""


def finish_when_gone(loop: Any, account: Account) -> None:
    """Finish the record when the loop is collected, at the end of the program, or of a child process.

    This is `weakref.finalize` that also runs in a child of `multiprocessing`, where Python runs no exit handlers, and
    that does nothing in a fork of the process.
    """
    if (shown := getattr(sys, "last_value", None)) is not None:
        vars(shown)[_EARLIER] = True
    Finalize(loop, _end, (weakref.ref(loop), account), exitpriority=0)


@contextlib.contextmanager
def settled_if_not_made(account: Account) -> Iterator[None]:
    """Settle the record as failed where the loop that it is of cannot be made, in the block."""
    try:
        yield
    except BaseException as error:
        account.end(error)
        raise


def _end(gone: weakref.ref[Any], account: Account) -> None:
    loop = gone()
    if loop is not None and not loop.closed:  # the process ends
        error = _ending(account)
        if error is not None:
            loop.failed(error)
        if loop.context.peers.alone:
            loop.__exit__(None if error is None else type(error), error, None)
        else:
            _ = loop.record  # settled without waiting for the device, which may wait for a process that is gone
    try:
        account.end()
    except Exception:  # noqa: BLE001 - Python would print it amid whatever runs now
        _log.warning("the record of a loop that was never closed could not be finished", exc_info=True)


def _ending(account: Account) -> BaseException | None:
    """Return the exception that the process ends with; None where none is known.

    A child ends within its exception; a program after its exception was shown. A notebook goes on after one was shown:
    there it counts where no step came after it.
    """
    shown = getattr(sys, "last_value", None)
    interactive = hasattr(sys, "ps1")
    if shown is not None and not (_EARLIER in vars(shown) or (interactive and not account.raised_last(shown))):
        return shown  # type: ignore[no-any-return]
    return sys.exc_info()[1]
