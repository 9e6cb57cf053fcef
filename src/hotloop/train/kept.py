"""The copy of a run that goes on: what follows if its storage fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.errors import TrainingFailedError
from hotloop.train.mirror import SETTING, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotloop.train.mirror import Mirror


class Kept:
    """Sends a run's folder at its saves and at its end. A storage that fails never ends a run early.

    A failing storage may take minutes to say so. So the next save is left out, then 2, 4, ... saves between two tries.

    Args:
        mirror: the run's; None sends nothing.
    """

    def __init__(self, mirror: Mirror | None) -> None:
        self.mirror, self.problem = mirror, ""
        self._pause, self._left = 1, 0

    def push(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Send what has changed, after a save. The first of several failures is said.

        Args:
            say: prints a line.
            names: the files to send; None sends all.

        Raises:
            ConfigError: another process has resumed the run.
        """
        if self._left:
            self._left -= 1
            return
        is_known = bool(self.problem)
        if not self._send(say, names) and not is_known:
            say(f"{self.problem}; the run goes on, and tries again after 1, 2, 4, ... saves and at its end")

    def push_last(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Send what has changed at the end of a run. A failure is said, and does not change how the run ends.

        Args:
            say: prints a line.
            names: the files to send; None sends all.

        Raises:
            ConfigError: another process has resumed the run.
        """
        if not self._send(say, names):
            say(f"{self.problem}; the copy there lacks what came last")

    def close(self, say: Callable[[str], None]) -> None:
        """Send what has changed at the end of a run that must not end well without its copy.

        Args:
            say: prints a line.

        Raises:
            ConfigError: another process has resumed the run.
            TrainingFailedError: the copy is not complete. The message says how to send the rest later.
        """
        if not self._send(say) and self.mirror:
            raise TrainingFailedError(
                f"the run is over and kept in {self.mirror.folder}, and not all of it is at its {SETTING}: "
                f"{self.problem}. Once that can be written, run.resume={self.mirror.folder} sends what is missing"
            )

    def _send(self, say: Callable[[str], None], names: Sequence[str] | None = None) -> bool:
        """Send what has changed, and return whether that worked. If not, `problem` says why."""
        if self.mirror is None:
            return True
        try:
            self.mirror.push(names)
        except StorageError as error:
            self.problem = str(error)
            self._left, self._pause = self._pause, 2 * self._pause
            return False
        if self.problem:
            say(f"{self.mirror.url} has all again")
        self.problem, self._pause = "", 1
        return True
