"""This process's own folder for torch's compile caches, filled from the store when it is made, kept when asked.

torch's default folder has a name that anybody can guess, in a place where anybody may write, and torch believes what it
finds there; a linker that is killed there leaves half a library. In a folder of the process's own neither can happen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.cache import files
from hotloop.cache.compiled import CHILDREN, CompiledStore, Manifest, files_in, remove_tree
from hotloop.cache.keys import fingerprint, fits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

FOLDER = "compiled"
_PREFIX = "hotloop-compiled-"
_LIFE = "alive"
"""A file that a process holds locked as long as it lives."""
_YOUNG = 60.0
"""Seconds in which a folder may not have been locked yet."""
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_TUNED = ".best_config"
"""The suffix of files that say which of a kernel's settings was the fastest."""
_log = logging.getLogger("hotloop")


def compiled_store() -> CompiledStore | None:
    """Give the store of compiled code of this user; None where nothing is to be kept (`files.default_folder`)."""
    try:
        folder = files.default_folder()
    except RuntimeError as error:
        _log.warning("compiled code is not kept: %s", error)
        return None
    return None if folder is None else CompiledStore(folder / FOLDER)


class Working:
    """The folder that torch's caches use in this process. Make it by `shared_compiles`.

    Args:
        store: what it is filled from, and what it is kept in.
    """

    def __init__(self, store: CompiledStore) -> None:
        self.store = store
        _remove_left()
        self.place = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
        life = _hold(self.place / _LIFE)
        self._end = weakref.finalize(self, _remove, self.place, life, os.getpid())  # also at the interpreter's end
        self._lock = threading.Lock()
        self._open: list[dict[str, str]] = []
        """The models of the blocks that run at present, by fingerprint: what is compiled is theirs."""
        self._failed = False
        self.known = {_LIFE}
        self._taken: set[str | None] = set()

    @contextlib.contextmanager
    def serving(self, *models: torch.nn.Module) -> Iterator[None]:
        """Take up what is kept for these models; what is compiled in the block is theirs, and kept at its end."""
        named = {fingerprint(model): type(model).__qualname__ for model in models}
        self._take_up(named)
        self._open.append(named)
        try:
            yield
        finally:
            self.keep()
            self._open.remove(named)  # an equal one does as well

    def _take_up(self, named: Mapping[str, str]) -> None:
        """Take up what is kept for models, or what was used last where none is named; each is looked up once."""
        began, before = time.monotonic(), len(self.known)
        wanted: set[str | None] = set(named) or {None}
        for one in wanted - self._taken:
            self._taken.add(one)
            self.known |= self.store.take_up(self.place, fits(), one)
        if taken := len(self.known) - before:
            _log.info("%d files of compiled code taken up in %.1f s", taken, time.monotonic() - began)

    def keep(self) -> int:
        """Keep what was compiled since the last time; gives how many files. Trouble is said once and ends no run."""
        with self._lock:
            found = files_in(self.place, self.known)
            if not found:
                return 0
            content = dict(found)
            models = {name: kind for block in self._open for name, kind in block.items()}
            manifest = Manifest(fits(), models, time.time(), tuple(content))
            try:
                self.store.put(manifest, lambda file: content[file].read_bytes())
            except OSError as error:
                if not self._failed:
                    self._failed = True
                    _log.warning("compiled code cannot be kept in %s: %s. The run goes on.", self.store.folder, error)
                return 0
            self.known |= {file.path for file in content}
            return len(content)


class ChildFolder:
    """A folder of its own for a child that may be killed at any time: what it wrote is kept only once it is done.

    It begins with what is whole in the process's folder, as links, so that the child does not compile that again.

    Args:
        working: the process's folder, which it lies in and goes with.
    """

    def __init__(self, working: Working) -> None:
        self._working = working
        (working.place / CHILDREN).mkdir(mode=0o700, exist_ok=True)
        self.place = Path(tempfile.mkdtemp(dir=working.place / CHILDREN))
        for name in sorted(working.known - {_LIFE}):
            with contextlib.suppress(FileNotFoundError):
                _link(working.place / name, self.place / name)
        self._given = frozenset(working.known)
        self._taken_over = False

    def take_over(self) -> None:
        """Move what the child compiled to the process's folder, where torch finds it and `Working.keep` keeps it."""
        try:
            for file, path in files_in(self.place, self._given):
                _link(path, self._working.place / file.path)
            self._taken_over = True
        except OSError as error:
            _log.warning("what was compiled in the background cannot be taken over: %s. The run goes on.", error)

    def remove(self) -> None:
        """Remove it with all that is in it.

        Of one that was taken over, what tuning found stays as long as the process's folder: kernels in torch's entries
        look for it by the absolute path that they were compiled at, and are tuned anew where it is gone.
        """
        remove_tree(self.place, but=_TUNED if self._taken_over else None)


def child_folder() -> ChildFolder | None:
    """Give a folder for a child that is started now; None where torch's folder is not ours.

    Raises:
        OSError: it cannot be made.
    """
    working = _process.working
    if working is None or os.environ.get(VARIABLE) != str(working.place):
        return None
    return ChildFolder(working)


def _link(source: Path, target: Path) -> None:
    """Give a file a second name, unless something is there; where files cannot have two, copy it."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.lexists(target):
        return
    try:
        target.hardlink_to(source)
    except FileExistsError:
        return
    except OSError:
        files.replace(target, source.read_bytes())
        target.chmod(source.stat().st_mode & 0o700)


def _hold(path: Path) -> int | None:
    """Lock a file for as long as this process lives; None where another one holds it, or there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl  # noqa: PLC0415 - not on every system

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_left() -> None:
    """Remove the folders that killed processes of this user left."""
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            files.check_folder(place)
            if time.time() - place.stat().st_mtime > _YOUNG and (life := _hold(place / _LIFE)) is not None:
                remove_tree(place)
                os.close(life)


def _remove(place: Path, life: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork, a data loader's worker say, ends while the run goes on
        return
    remove_tree(place)
    if life is not None:
        os.close(life)


@dataclasses.dataclass
class _Process:
    working: Working | None = None


_process = _Process()


@contextlib.contextmanager
def shared_compiles(*models: torch.nn.Module) -> Iterator[Working | None]:
    """Have torch's compile caches shared with this user's other processes, those to come included, in the block.

    What is compiled in the block is kept at its end, and whenever `Working.keep` is called. Blocks may be nested and
    repeated: a process has one folder. Gives None, and changes nothing, where ``$HOTLOOP_CACHE_DIR`` is empty, or where
    the user chose a folder for torch by ``$TORCHINDUCTOR_CACHE_DIR``.

    Args:
        models: what will be compiled; only what was kept for them is taken up.
    """
    before = os.environ.get(VARIABLE)
    working = _process.working
    if working is None or before != str(working.place):
        working = None if before is not None and not _torchs_own(before) else _open()
    if working is None:
        yield None
        return
    try:
        with working.serving(*models):
            os.environ[VARIABLE] = str(working.place)
            yield working
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _open() -> Working | None:
    """Give the process's folder, made the first time or where the store is another one now."""
    store = compiled_store()
    if store is None:
        return None
    if _process.working is None or _process.working.store.folder != store.folder:
        try:
            _process.working = Working(store)
        except OSError as error:
            _log.warning("compiled code is not shared: %s", error)
            return None
    return _process.working


def _torchs_own(folder: str) -> bool:
    """Tell torch's default folder, which torch itself writes into the environment, from one that the user chose."""
    path = Path(folder)
    return path.parent == Path(tempfile.gettempdir()) and path.name.startswith("torchinductor_")
