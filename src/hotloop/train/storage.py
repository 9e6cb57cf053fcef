"""``run.storage``: a run copies its folder to another folder or a URL after each save, to be resumed anywhere."""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hotloop import places
from hotloop.errors import ConfigError, TrainingFailedError, describe
from hotloop.files import read, whole
from hotloop.train import checkpoint
from hotloop.train.turn import LOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SETTING = "run.storage"
STORED = "stored.json"
"""The file of a copy that is sent last: it counts how often the copy was brought up to date."""
PAUSE_SECONDS = 300.0
"""How long a run leaves a storage alone that has failed: each try may hang for a minute."""


class StorageError(Exception):
    """A storage cannot be read or written. The message names the URL and the reason."""


class Copy:
    """The copy of a run's folder.

    Args:
        url: where it is.
        folder: the run's on this machine.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder, self.problem = url.rstrip("/"), folder, ""
        self._line = places.Line()
        self._sent: dict[str, tuple[int, int]] = {}
        self._again = 0.0

    @functools.cached_property
    def _place(self) -> places.Place:
        return places.Place(self.url, self._line)

    def push(self, say: Callable[[str], None], names: Sequence[str] | None = None, *, last: bool = False) -> bool:
        """Send the files that have changed, and return whether that worked. The first failure is printed.

        Args:
            say: prints a line.
            names: the files to send; None sends all.
            last: try although the storage has failed a moment ago.
        """
        if time.monotonic() < self._again and not last:
            return False
        try:
            self._push(names)
        except Exception as error:  # noqa: BLE001 - each protocol has errors of its own
            if not self.problem:
                say(f"{self.url} cannot be written: {describe(error)}; the run goes on, and tries again later")
            self.problem, self._again = describe(error), time.monotonic() + PAUSE_SECONDS
            return False
        self.problem = ""
        return True

    def close(self, say: Callable[[str], None]) -> None:
        """Send what is missing at the end of a run.

        Raises:
            TrainingFailedError: the copy is not complete.
        """
        if not self.push(say, last=True):
            raise TrainingFailedError(
                f"the run is over and kept in {self.folder}, and not all of it is at {self.url}: {self.problem}. Once "
                f"that can be written, run.resume={self.folder} sends what is missing"
            )

    def pull(self) -> bool:
        """Fetch the copy where it is newer than the folder here, and return whether there is a copy.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            there = self.saves()
            if there > _stored(self.folder)["saves"]:
                self._pull()
        except Exception as error:  # each protocol has errors of its own
            raise StorageError(f"{self.url} cannot be read: {describe(error)}") from error
        return there > 0

    def saves(self) -> int:
        """Return how often the copy was brought up to date; 0 where there is none."""
        try:
            text = self._line.within(places.ANSWER_SECONDS, self._place.files.cat_file, f"{self._place.root}/{STORED}")
        except (FileNotFoundError, NotADirectoryError):
            return 0
        return int(json.loads(text)["saves"])

    def _push(self, names: Sequence[str] | None) -> None:
        inside = names or [one.relative_to(self.folder).as_posix() for one in self.folder.rglob("*") if one.is_file()]
        kept = [one for one in inside if not PurePosixPath(one).name.startswith((".", LOCK, STORED))]
        changed = {name: facts for name in kept if (facts := self._facts(name)) and self._sent.get(name) != facts}
        for name in sorted(changed, key=lambda name: (name.endswith(".pt"), name.endswith(checkpoint.LAST), name)):
            self._place.put(self.folder / name, f"{self._place.root}/{name}")
            self._sent[name] = changed[name]
        if changed:
            with whole(self.folder / STORED, durable=False) as file:
                file.write(json.dumps({"url": self.url, "saves": _stored(self.folder)["saves"] + 1}).encode())
            self._place.put(self.folder / STORED, f"{self._place.root}/{STORED}")

    def _facts(self, name: str) -> tuple[int, int] | None:
        path = self.folder / name
        return (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else None

    def _pull(self) -> None:
        files = self._place.files
        files.invalidate_cache()
        found = self._line.within(places.ANSWER_SECONDS, lambda: files.find(self._place.root, detail=True))
        names = {name.removeprefix(self._place.root).lstrip("/"): facts.get("size") for name, facts in found.items()}
        for name in sorted(names, key=lambda name: (name == STORED, name)):
            if ".." not in PurePosixPath(name).parts and not name.endswith(".part"):
                with whole(self.folder / name, durable=False) as part:
                    self._place.get(f"{self._place.root}/{name}", Path(part.name), names[name] or 0)


def of(storage: str | None, folder: Path, study: Path | None = None) -> Copy | None:
    """Return the copy of a run's folder; None without a storage, or where the folder is the copy itself.

    Args:
        storage: the value of ``run.storage``.
        folder: the run's.
        study: the folder of the search or cross-validation that the run is part of; the copy lies below its name.
    """
    if storage is None:
        return None
    inside = folder.relative_to(study.parent) if study and folder.is_relative_to(study) else Path(folder.name)
    url = f"{storage.rstrip('/')}/{PurePosixPath(inside)}"
    return None if Path(url).resolve() == folder.resolve() else Copy(url, folder)


def bring(copy: Copy | None, say: Callable[[str], None]) -> None:
    """Fetch what another machine has stored of a run. A failure is printed: the copy can be fetched later."""
    try:
        if copy:
            copy.pull()
    except StorageError as error:
        say(str(error))


def check(url: str | None, folder: Path) -> None:
    """Check that a storage has no run of the name of a new run's folder.

    Raises:
        ConfigError: it has one, or cannot be read.
    """
    copy = of(url, folder)
    try:
        taken = copy.saves() if copy else 0
    except Exception as error:  # each protocol has errors of its own
        raise ConfigError(f"{SETTING}={url} cannot be read: {describe(error)}") from error
    if copy and taken:
        raise ConfigError(f"{SETTING}={url} has a run of this name: go on with it by run.resume={copy.url}")


def fetched(url: str) -> Path:
    """Fetch the run whose copy ``run.resume`` names, and return its folder, ``runs/NAME``.

    Raises:
        ConfigError: the URL has no run, or cannot be read; or ``runs/`` has another run of this name.
    """
    places.check_url(url, "run.resume", "begins a new run")
    copy = Copy(url, Path("runs", PurePosixPath(url.rstrip("/")).name))
    if copy.folder.exists() and _stored(copy.folder)["url"] != copy.url:
        raise ConfigError(
            f"run.resume={url}: {copy.folder} is another run of that name; go on with it by run.resume={copy.folder}, "
            "or start the command in another folder"
        )
    try:
        if not copy.pull():
            raise ConfigError(f"run.resume={url}: no run is stored there; expected the URL of a run's folder")
    except StorageError as error:
        raise ConfigError(f"run.resume={url}: {error}") from error
    return copy.folder


def _stored(folder: Path) -> dict[str, Any]:
    """Return what a folder here knows of its copy."""
    try:
        found: dict[str, Any] = json.loads(read(folder / STORED))
    except (OSError, ValueError):
        return {"url": "", "saves": 0}
    return found
