"""This process's own folder for torch's compile caches, filled from the store when it is made, kept when asked.

torch's default folder has a name that anybody can guess, in a place where anybody may write, and torch trusts what it
finds there; a linker that is killed there leaves half a library. In a folder of the process's own neither can happen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.settings import patched
from hotloop.cache import files, headers
from hotloop.cache.compiled import CHILDREN, CompiledStore, Manifest
from hotloop.cache.keys import fingerprint, fits
from hotloop.cache.torch_files import files_in, remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_PREFIX = "hotloop-compiled-"
_ALIVE = "alive"
"""A file in each folder that its process holds locked as long as it lives."""
_log = logging.getLogger("hotloop")


def compiled_store() -> CompiledStore | None:
    """Return the store of compiled code of this user; None where nothing is to be kept (`files.default_folder`)."""
    try:
        folder = files.default_folder()
    except RuntimeError as error:
        _log.warning("compiled code is not kept: %s", error)
        return None
    return None if folder is None else CompiledStore(folder / "compiled")


class ProcessFolder:
    """The folder that torch's caches use in this process. Make it by `shared_compiles`.

    Args:
        store: the store that it is filled from, and that its new files are kept in.
    """

    current: ClassVar[ProcessFolder | None] = None

    def __init__(self, store: CompiledStore) -> None:
        self.store = store
        _remove_abandoned()
        self.place = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
        lock = _lock(self.place / _ALIVE)
        self._end = weakref.finalize(self, _remove, self.place, lock, os.getpid())  # also at the interpreter's end
        self._lock = threading.Lock()
        self._open: list[dict[str, str]] = []
        """By block that runs now, its models by fingerprint: the code that is compiled now belongs to them."""
        self._warn = files.WarnOnce("The run goes on.")
        self.known = {_ALIVE}
        self._loaded: set[str | None] = set()

    @classmethod
    def open(cls) -> ProcessFolder | None:
        """Return the process's folder. It is made the first time, and again where the store is another one now."""
        store = compiled_store()
        if store is None:
            return None
        if cls.current is None or cls.current.store.folder != store.folder:
            try:
                cls.current = cls(store)
            except OSError as error:
                _log.warning("compiled code is not shared: %s", error)
                return None
        return cls.current

    @contextlib.contextmanager
    def serving(self, *models: torch.nn.Module) -> Iterator[None]:
        """Load what is kept for these models; code that is compiled in the block is theirs, and kept at its end."""
        named = {fingerprint(model): type(model).__qualname__ for model in models}
        self._load(named)
        self._open.append(named)
        try:
            yield
        finally:
            self.keep()
            self._open.remove(named)  # removing an equal dictionary is as good

    def _load(self, named: Mapping[str, str]) -> None:
        """Load what is kept for models, or the most recently used code where none is named; each is loaded once."""
        began, before = time.monotonic(), len(self.known)
        wanted: set[str | None] = set(named) or {None}
        for model in wanted - self._loaded:
            self._loaded.add(model)
            self.known |= self.store.load_into(self.place, fits(), model)
        if loaded := len(self.known) - before:
            _log.info("%d files of compiled code taken up in %.1f s", loaded, time.monotonic() - began)

    def keep(self) -> int:
        """Keep the files compiled since the last call, and count them. Trouble is said once and ends no run."""
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
                self._warn(f"compiled code cannot be kept in {self.store.folder}: {error}")
                return 0
            self.known |= {file.path for file in content}
            return len(content)


class ChildFolder:
    """A folder for a child process that may be killed at any time: its files are kept only once it is done.

    It begins with the whole files of the process's folder, as links, so that the child does not compile them again.

    Args:
        parent: the process's folder, which the child's lies in and is removed with.
    """

    def __init__(self, parent: ProcessFolder) -> None:
        self._parent = parent
        (parent.place / CHILDREN).mkdir(mode=0o700, exist_ok=True)
        self.place = Path(tempfile.mkdtemp(dir=parent.place / CHILDREN))
        for name in sorted(parent.known - {_ALIVE}):
            with contextlib.suppress(FileNotFoundError):
                _link(parent.place / name, self.place / name)
        self._given = frozenset(parent.known)
        self._taken_over = False

    def take_over(self) -> None:
        """Move the child's files to the process's folder, where torch finds and `ProcessFolder.keep` keeps them."""
        try:
            for file, path in files_in(self.place, self._given):
                _link(path, self._parent.place / file.path)
            self._taken_over = True
        except OSError as error:
            _log.warning("what was compiled in the background cannot be taken over: %s. The run goes on.", error)

    def remove(self) -> None:
        """Remove the folder with everything in it.

        After `take_over` the results of tuning stay as long as the process's folder. Kernels in torch's entries look
        for them by the absolute path that they were compiled at, and are tuned anew where the file is gone.
        """
        remove_tree(self.place, but=".best_config" if self._taken_over else None)


def child_folder() -> ChildFolder | None:
    """Return a folder for a child process that is started now; None where torch's folder is not ours.

    Raises:
        OSError: it cannot be made.
    """
    current = ProcessFolder.current
    if current is None or os.environ.get(VARIABLE) != str(current.place):
        return None
    return ChildFolder(current)


def _link(source: Path, target: Path) -> None:
    """Link a file under a second name, unless something is there; copy it where files cannot have two names."""
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


def _lock(path: Path) -> int | None:
    """Lock a file for as long as this process lives; None where another process holds it, or there are no locks.

    Not by filelock, as a run's folder is: the core does without it, and a fork that ends must not unlock.
    """
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


def _remove_abandoned() -> None:
    """Remove the folders that killed processes of this user left."""
    not_locked_yet = 5.0  # seconds in which a process may have made its folder, and not locked its file
    for place in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            files.check_folder(place)
            old = time.time() - place.stat().st_mtime > not_locked_yet
            if old and (lock := _lock(place / _ALIVE)) is not None:
                remove_tree(place)
                os.close(lock)


def _remove(place: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork, such as a data loader's worker, ends while the run goes on
        return
    remove_tree(place)
    if lock is not None:
        os.close(lock)


@contextlib.contextmanager
def _no_headers_of_others() -> Iterator[None]:
    """Compile without precompiled headers where another user may write them.

    Torch keeps them in its default folder, whatever folder is chosen for all else, and includes what it finds there.
    """
    with contextlib.ExitStack() as stack:
        try:
            files.make_folder(Path(private("torch._inductor.runtime.cache_dir_utils:default_cache_dir")()))
        except OSError as error:
            _log.warning("torch's precompiled headers are not used: %s. The run goes on.", error)
            stack.enter_context(patched("torch._inductor:config", cpp_cache_precompile_headers=False))
        except CapabilityMissingError:
            pass  # a torch that keeps them elsewhere
        yield


@contextlib.contextmanager
def shared_compiles(*models: torch.nn.Module) -> Iterator[ProcessFolder | None]:
    """Share torch's compile caches with this user's other processes, also later ones, while the block runs.

    Code that is compiled in the block is kept at its end, and whenever `ProcessFolder.keep` is called. Blocks may be
    nested and repeated: a process has one folder. Yields None, and changes nothing, where ``$HOTLOOP_CACHE_DIR`` is
    empty, or where the user chose a folder for torch by ``$TORCHINDUCTOR_CACHE_DIR``.

    Args:
        models: the models that will be compiled; only code that was kept for them is loaded.
    """
    before = os.environ.get(VARIABLE)
    folder = ProcessFolder.current
    if folder is None or before != str(folder.place):
        # torch itself writes its default folder into the environment, so that folder is no choice of the user's.
        chosen = Path(before) if before is not None else None
        is_default = chosen is None or (
            chosen.parent == Path(tempfile.gettempdir()) and chosen.name.startswith("torchinductor_")
        )
        folder = ProcessFolder.open() if is_default else None
    if folder is None:
        yield None
        return
    try:
        with folder.serving(*models), _no_headers_of_others(), headers.built_as_needed():
            os.environ[VARIABLE] = str(folder.place)
            yield folder
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before
