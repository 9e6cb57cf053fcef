"""A shared cache: bundles of compiled code in a folder, or at any URL that fsspec knows, for machines of several kinds.

::

    SHARE/<kind>/fits.json      versions and hardware of one kind of machine
    SHARE/<kind>/<name>.zip     a bundle: the code of one set of models

A bundle is code that runs as whoever takes it, so a share is trusted as the folder of a program is: name one that
only people write to whom you would let run code. A bundle that was torn or damaged is named, and left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import places
from hotloop.cache.bundle import import_bundle, write_bundle
from hotloop.cache.compiled import compiled_store, differences
from hotloop.cache.keys import fits
from hotloop.errors import ConfigError, DataError, describe
from hotloop.report.text import count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from hotloop.cache.compiled import CompiledStore

_FITS = "fits.json"
_NAME = re.compile(r"[0-9a-f]{64}\.zip")
MOST_TAKEN_BYTES = 2**30
"""Of the bundles that are taken at a time."""
_MOST_KINDS = 100
"""Kinds of machines whose differences are looked at, where there is no bundle for this one."""


def check_url(url: str) -> None:
    """Refuse what can be no shared cache, before anything is asked of it.

    Raises:
        ConfigError: as `hotloop.places.check_url`; or a folder is a file, or one that anybody may write to.
    """
    if places.check_url(url, "cache.share", "shares nothing") in ("file", "local"):
        import fsspec  # type: ignore[import-untyped]  # noqa: PLC0415 - as there

        _refuse_open(url, Path(fsspec.url_to_fs(url)[1]))


def _refuse_open(url: str, folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not there, or may not be looked at: whoever reads it says so
        mode = folder.stat().st_mode
        if stat.S_ISREG(mode):
            raise ConfigError(f"cache.share={url}: expected a folder, and this is a file: name a folder")
        if os.name == "posix" and mode & stat.S_IWOTH:
            raise ConfigError(
                f"cache.share={url}: anybody may write to {folder}, and what is there runs as you: take the right to "
                "write from others (chmod o-w)"
            )


@dataclasses.dataclass(frozen=True)
class Moved:
    """What was taken from a shared cache, or given to it.

    Attributes:
        bundles: how many.
        size: their bytes.
        misses: why a bundle was left out; or, where none fits, what the share has instead.
    """

    bundles: int
    size: int
    misses: tuple[str, ...] = ()

    def __str__(self) -> str:
        moved = f"{count(self.bundles, 'bundle')}, {self.size / 2**20:,.1f} MiB" if self.bundles else "nothing"
        return "; ".join((moved, *self.misses))


class Share:
    """A shared cache.

    Args:
        url: a folder, or a URL such as ``s3://bucket/cache``. The package of its protocol has to be installed.

    Raises:
        ConfigError: as `check_url`, or anybody may write to the folder.
        DataError: the share cannot be reached.
    """

    def __init__(self, url: str) -> None:
        check_url(url)
        self.url, self._here = url, fits()
        with self._reaching("reached"):
            self._place = places.Place(url)
        self._files, self._root = self._place.files, self._place.root
        self._kind = f"{self._root}/{_digest(self._here)}"
        if self._place.is_folder:
            for folder in (self._root, self._kind):
                _refuse_open(url, Path(folder))

    def pull(self, store: CompiledStore) -> Moved:
        """Take those of the newest bundles for this machine that the store has not.

        Raises:
            DataError: the share cannot be read.
            OSError: the store cannot be written.
        """
        with self._reaching("read"):
            there = places.within(places.ANSWER_SECONDS, self._bundles)
            if not there:
                return Moved(0, 0, tuple(places.within(places.ANSWER_SECONDS, self._others)))
        newest = sorted(there.items(), key=lambda pair: _age(pair[1]), reverse=True)
        known = {name for entry in store.entries() for name in (entry.name, *entry.taken)}
        room, taken, size, misses = MOST_TAKEN_BYTES, 0, 0, []
        with tempfile.TemporaryDirectory(prefix="hotloop-share-") as place:
            bundle = Path(place, "bundle.zip")
            for name, one in newest:
                # What the store has counts too: a share that is larger would else be taken part for part by each run.
                if (room := room - _size(one)) < 0:
                    break
                if name in known or not self._get(one, bundle):
                    continue
                try:
                    import_bundle(store, bundle, name=name)
                except DataError as error:
                    misses.append(str(error).replace(str(bundle), one["name"]))
                else:
                    taken, size = taken + 1, size + bundle.stat().st_size
        return Moved(taken, size, tuple(misses))

    def _get(self, one: Mapping[str, Any], bundle: Path) -> bool:
        """Bring a bundle; return False where another process has made room meanwhile."""
        try:
            with self._reaching("read"):
                self._place.get(one["name"], bundle, _size(one))
        except DataError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise
        return True

    def push(self, store: CompiledStore, but: Collection[str] = ()) -> Moved:
        """Send what the store has for this machine and the share has not.

        Args:
            store: the store.
            but: names of entries that are not given.

        Raises:
            DataError: the share cannot be written.
        """
        with self._reaching("read"):
            there = places.within(places.ANSWER_SECONDS, self._bundles)
        given, size, others = 0, 0, list[str]()
        with tempfile.TemporaryDirectory(prefix="hotloop-share-") as place:
            for entry in store.entries():
                name = entry.name
                if name in there or name in but or not entry.files:
                    continue
                if differing := entry.differences(self._here):
                    others.append(", ".join(differing))
                    continue
                bundle = Path(place, f"{name}.zip")
                write_bundle([entry], bundle)
                with self._reaching("written"):
                    self._place.put(bundle, f"{self._kind}/{bundle.name}")
                given, size = given + 1, size + bundle.stat().st_size
                bundle.unlink()
            if given:
                facts = Path(place, _FITS)
                facts.write_text(json.dumps(self._here, sort_keys=True), encoding="utf-8")
                with self._reaching("written"):
                    places.within(places.MOVE_SECONDS, self._finish, facts)
        left = [f"{len(others)} kept for other versions or hardware, such as {others[0]}"] if others else []
        return Moved(given, size, tuple(left))

    def _bundles(self) -> dict[str, dict[str, Any]]:
        """Return what the share says of each bundle for this machine, by its name."""
        self._files.invalidate_cache()
        try:
            rows = self._files.ls(self._kind, detail=True)
        except FileNotFoundError:
            return {}
        found = {str(row["name"]).rpartition("/")[2]: row for row in rows if row["type"] == "file"}
        return {name.removesuffix(".zip"): row for name, row in found.items() if _NAME.fullmatch(name)}

    def _others(self) -> list[str]:
        """Say what code the share has for the machine most like this one: which parts differ."""
        try:
            rows = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        found: list[list[str]] = []
        for row in rows[:_MOST_KINDS]:
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
                text = self._files.cat_file(f"{row['name'].rstrip('/')}/{_FITS}", start=0, end=2**16)
                other = {str(name): str(value) for name, value in json.loads(text).items()}
                found.append(differences(other, self._here))
        nearest: list[str] = min(found, key=len, default=[])
        return [f"it has code for {', '.join(nearest)}"] if nearest else []

    def _finish(self, facts: Path) -> None:
        """Say what the kind of machine is."""
        if not self._files.exists(f"{self._kind}/{_FITS}"):  # some servers replace no file
            self._place.put(facts, f"{self._kind}/{_FITS}")

    @contextlib.contextmanager
    def _reaching(self, verb: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each protocol has errors of its own
            raise DataError(f"the shared cache {self.url} cannot be {verb}: {describe(error)}") from error


@contextlib.contextmanager
def shared_cache(url: str | None, say: Callable[[str], None]) -> Iterator[None]:
    """Take compiled code from a shared cache before a block, and give it what was compiled in the block after it.

    A share that cannot be reached is said, and costs the run nothing but the code.

    Args:
        url: as `Share` takes it; None shares nothing.
        say: called with what was moved, and with each trouble.

    Raises:
        ConfigError: as `Share`.
    """
    store = compiled_store() if url is not None else None
    if url is None or store is None:
        if url is not None:
            say(f"cache.share={url} is not used: HOTLOOP_CACHE_DIR is empty, so that nothing is kept")
        yield
        return
    try:
        share = Share(url)
    except DataError as error:
        say(f"{error}. The run goes on without it.")
        yield
        return
    _told(say, f"Taken from the shared cache {url}", lambda: share.pull(store))
    others = {entry.name for entry in store.entries()}  # of other programs, which their owner may not want there
    try:
        yield
    finally:
        _told(say, f"Given to the shared cache {url}", lambda: share.push(store, but=others))


def _told(say: Callable[[str], None], what: str, move: Callable[[], Moved]) -> None:
    try:
        say(f"{what}: {move()}")
    except (DataError, OSError) as error:
        say(f"{error}. The run goes on without it.")


def _age(row: Mapping[str, Any]) -> float:
    """Return when a bundle was written, in seconds since 1970; 0 where the protocol does not tell."""
    when = row.get("mtime") or row.get("LastModified") or row.get("created") or row.get("updated") or 0.0
    return float(when.timestamp() if hasattr(when, "timestamp") else when) if not isinstance(when, str) else 0.0


def _size(row: Mapping[str, Any]) -> int:
    """Return the bytes of a bundle; 0 where the protocol does not tell (a listing over HTTP)."""
    return int(row.get("size") or 0)


def _digest(here: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(here, sort_keys=True).encode()).hexdigest()[:32]
