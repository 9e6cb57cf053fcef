"""Ctrl-C and SIGTERM as a wish: the step that runs is finished first, so that the run can be resumed after it."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WISHED = "_hotloop_stop"


class Interrupt:
    """While in force, a first SIGINT or SIGTERM is remembered in ``signal``; a second acts as it always does.

    An error that leaves the block while one is remembered is told so, see `wished`. Outside the main thread signals
    cannot be caught, and it does nothing.

    Args:
        doing: what is done before the process stops, as a first signal is answered.
    """

    def __init__(self, doing: str = "finishing this step, then saving") -> None:
        self._doing = doing
        self.signal: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {one: signal.signal(one, self._note) for one in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._restore()
        if error is not None and self.signal:
            setattr(error, _WISHED, self.signal)

    def _restore(self) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        self._before = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        # A plain write: the handler may have broken into a print of the same stream.
        os.write(2, f"\n{self.signal}: {self._doing}; again to stop at once\n".encode())
        self._restore()


def wished(error: BaseException) -> bool:
    """Say whether somebody wished to stop a run that this error ended: whoever would go on after it stops as well."""
    return getattr(error, _WISHED, None) is not None
