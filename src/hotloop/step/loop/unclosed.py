"""Finishes the record of a loop that nobody closed: when it is collected, or when its process ends."""

from __future__ import annotations

import sys
import weakref
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.step.loop.account import Account


def finish_when_gone(loop: Any, account: Account) -> None:
    """Finish the record when the loop is collected, at the end of the program, or of a child process.

    This is `weakref.finalize` that also runs in a child of `multiprocessing`, where Python runs no exit handlers, and
    that does nothing in a fork of the process.
    """
    Finalize(loop, _end, (weakref.ref(loop), account), exitpriority=0)


def _end(gone: weakref.ref[Any], account: Account) -> None:
    loop = gone()
    if loop is not None and not loop.closed:  # the process ends
        # A child ends within its exception; a program after its exception was shown.
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        if error is not None:
            loop.failed(error)
        if loop.context.peers is None:
            loop.__exit__(None if error is None else type(error), error, None)
        else:
            _ = loop.record  # settled without waiting for the device, which may wait for a process that is gone
    account.end()
