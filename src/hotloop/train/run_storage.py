"""Checks of ``run.storage`` before training starts, and the download of a run that is resumed from its copy."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path, PurePosixPath

from hotloop import places
from hotloop.errors import ConfigError, describe
from hotloop.train.mirror import GENERATION, SETTING, STORED, Mirror, StorageError, Version, of, version_of


def check(url: str | None) -> None:
    """Check that a storage can be written: write an empty file there, and delete it.

    Args:
        url: the value of ``run.storage``; None checks nothing.

    Raises:
        ConfigError: the file cannot be written or deleted. The message has the storage's reason.
    """
    if url is None:
        return
    try:
        place = places.Place(url)
        name = f"{place.root}/.{secrets.token_hex(8)}"
        with tempfile.NamedTemporaryFile(prefix="hotloop-") as empty:
            place.put(Path(empty.name), name)
        places.within(places.ANSWER_SECONDS, place.files.rm_file, name)
    except Exception as error:  # each protocol has errors of its own
        raise ConfigError(
            f"{SETTING}={url} cannot be written: {describe(error)}. Name a place that exists and that you may write "
            "to, or leave it out"
        ) from error


def check_new(url: str | None, folder: Path) -> None:
    """Check, for a new run, that its storage can be written and has no run of the same name.

    Raises:
        ConfigError: the storage cannot be read or written, or has a run of this name.
    """
    check(url)
    mirror = of(url, folder)
    if mirror and _read(mirror):
        raise ConfigError(
            f"{SETTING}={url} holds a run {folder.name} already: go on with it by run.resume={mirror.url}, or name "
            "another run.folder"
        )


def check_resumed(url: str | None, folder: Path) -> None:
    """Check, for a resumed run, that its storage can be written and has no newer version of the run.

    Raises:
        ConfigError: the storage cannot be read or written, or another process has resumed the run.
    """
    check(url)
    mirror = of(url, folder)
    if mirror and (there := _read(mirror)) and there > version_of(folder):
        raise ConfigError(
            f"run.resume={folder}: a newer state of the run is at {mirror.url}, which another process has gone on "
            f"with. Go on there, by run.resume={mirror.url} in a folder without this run"
        )


def _read(mirror: Mirror) -> Version | None:
    try:
        return mirror.stored()
    except StorageError as error:
        raise ConfigError(f"{SETTING}: {error}") from error


def is_copy(folder: Path) -> bool:
    """Return whether a folder on this machine is a copy that ``run.storage`` made."""
    return any(GENERATION.fullmatch(one.parent.name) for one in folder.glob(f"*/{STORED}"))


def fetched(url: str) -> Path:
    """Fetch the run whose copy ``run.resume`` names, and return its folder on this machine.

    A folder that is as new as the copy stays as it is.

    Raises:
        ConfigError: the URL has no run, or cannot be read; or ``runs/`` has another run of this name.
    """
    places.check_url(url, "run.resume", "begins a new run")
    folder = Path("runs", PurePosixPath(url).name)
    mirror = Mirror(url.rstrip("/"), folder)
    try:
        if mirror.stored() is None:
            raise ConfigError(
                f"run.resume={url}: no run is stored there; expected the URL of a run's folder, which {SETTING} says"
            )
        if folder.exists() and not (folder / STORED).is_file():
            raise ConfigError(
                f"run.resume={url}: {folder} is another run of that name; go on with it by run.resume={folder}, or "
                "start the command in another folder"
            )
        mirror.take()
    except StorageError as error:
        raise ConfigError(f"run.resume={url}: {error}") from error
    return folder
