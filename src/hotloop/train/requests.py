"""A request to a run that trains: an empty file ``save`` in its folder has it write a checkpoint after its step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SAVE = "save"
EVERY_SECONDS = 1.0


class Requests:
    """Looks for a request in a run's folder, once a second at most; ``folder`` None never has one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._next = folder, 0.0

    def asked(self) -> bool:
        """Return whether a checkpoint is asked for now; the request is taken."""
        if self._folder is None or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + EVERY_SECONDS
        asked = is_asked(self._folder)
        if asked:
            (self._folder / SAVE).unlink(missing_ok=True)
        return asked


def is_asked(run: Path) -> bool:
    """Return whether a request lies in a run's folder."""
    return (run / SAVE).is_file()


def ask(run: Path) -> None:
    """Ask a run for a checkpoint."""
    (run / SAVE).touch()
