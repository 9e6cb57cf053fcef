"""Runs on clusters, as the page knows them: which clusters were added, and which runs this user submitted.

What a folder of runs says of a cluster is shown, and never acted on: a stranger may have written it. Only runs that are
remembered in this user's own folder (`hotloop.remote.runs`) are followed, stopped or resumed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.remote import clusters, runs
from hotloop.ui import processes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.remote.runs import RemoteRun


class Elsewhere:
    """What is known of clusters; several threads may ask."""

    def __init__(self) -> None:
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._seen: object = None
        self._found: Mapping[Path, RemoteRun] = {}

    def addresses(self) -> list[str]:
        """Return the clusters that were added, the last used first.

        Raises:
            ConfigError: they cannot be read.
        """
        return clusters.known()[::-1]

    def run_of(self, folder: Path) -> RemoteRun | None:
        """Return the remote run that a folder is of; None where this user submitted none."""
        with self._lock:
            place = clusters.state_folder() / "runs"
            seen = place.stat().st_mtime_ns if place.is_dir() else None
            if seen != self._seen:
                self._found = {Path(one.folder): one for one in reversed(runs.known())}
                self._seen = seen
            return self._found.get(folder)

    def shown(self, folder: Path) -> tuple[RemoteRun | None, str]:
        """Return the remote run of a folder and its cluster, to be shown; the latter is empty where it ran here.

        What cannot be read of this user's own folder hides no run: an act that needs it says so.
        """
        try:
            run = self.run_of(folder)
        except ConfigError:
            run = None
        return run, run.address if run else processes.where_of(folder)

    def start(self, folder: Path, arguments: list[str], address: str) -> None:
        """Submit a run to a cluster, and follow it.

        Raises:
            ConfigError: the folder cannot be written.
        """
        processes.start(folder, arguments, address)

    def follow(self, folder: Path) -> None:
        """Follow a run that nobody follows, and resume it where it is over before its end; a second press does nothing.

        Raises:
            ConfigError: this user submitted no such run, or the folder cannot be written.
        """
        run = self.run_of(folder)
        if run is None:
            raise ConfigError(f"{folder.name}: it was not submitted by you from this machine. Resume it where it was")
        with self._starting:
            if processes.find(folder) is None:
                self.start(folder, list(run.command), run.address)
