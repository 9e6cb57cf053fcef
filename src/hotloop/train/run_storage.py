"""What is told of ``run.storage`` before work starts, and the folder of a run that goes on from there."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path, PurePosixPath

from hotloop import places
from hotloop.errors import ConfigError, describe
from hotloop.train.mirror import GENERATION, SETTING, STORED, Mirror, StorageError, Version, of, version_of


def check(url: str | None) -> None:
    """Check that a storage can be written, by a small file that is removed.

    Raises:
        ConfigError: it cannot, with what it says.
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
    """Check that a storage can be written, and has no run of a new folder's name.

    Raises:
        ConfigError: it cannot, or has.
    """
    check(url)
    mirror = of(url, folder)
    if mirror and _read(mirror):
        raise ConfigError(
            f"{SETTING}={url} holds a run {folder.name} already: go on with it by run.resume={mirror.url}, or name "
            "another run.folder"
        )


def check_resumed(url: str | None, folder: Path) -> None:
    """Check that a storage can be written, and that no other machine has gone on with the run of a folder.

    Raises:
        ConfigError: it cannot, or one has.
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
    """Return whether a folder of this machine is the copy of a run's folder."""
    return any(GENERATION.fullmatch(one.parent.name) for one in folder.glob(f"*/{STORED}"))


def fetched(url: str) -> Path:
    """Return the folder of a run that ``run.resume`` names by its copy: the newer of that here and that there.

    Raises:
        ConfigError: no run is there, it cannot be read, or another one is here.
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
