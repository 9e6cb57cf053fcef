"""The folders of compiled code: torch's own caches, one folder for each set of models, versions and hardware.

::

    compiled/<key>/about.json   what the code fits to, and the models that it was compiled for
    compiled/<key>/uses         a byte for each process that used it
    compiled/<key>/taken        the bundles that were imported into it
    compiled/<key>/torchinductor_cache/...    what torch's caches wrote

A file of a cache is code that will run. torch's default folder has a name that anybody can guess, in a place where
anybody may write, and torch trusts what it finds there. These folders are the user's own, and no other user can look
into them; a folder that another user owns or may write to is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.settings import patched
from hotloop.cache import files
from hotloop.cache.keys import fingerprint, fits
from hotloop.files import open_append

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SCHEMA_VERSION = 1
_ABOUT, _USES, _TAKEN, _TORCH = "about.json", "uses", "taken", "torchinductor_cache"
_MOST_ABOUT_BYTES = 2**20
_NOT_KEPT = ("triton", "locks", "tmp")
"""Folders of torch's that no bundle has. Triton's hold absolute paths; torch writes them anew from its entries."""
_UNUSED_DAYS = 60.0
_log = logging.getLogger("hotloop")


@dataclasses.dataclass(frozen=True)
class Entry:
    """The compiled code of one set of models.

    Args:
        folder: where it is.
        fits: versions and hardware, by name (`hotloop.cache.keys.fits`).
        models: the classes of the models, by fingerprint.
    """

    folder: Path
    fits: Mapping[str, str]
    models: Mapping[str, str]

    @property
    def torch(self) -> Path:
        """The folder for torch's caches."""
        return self.folder / _TORCH

    @property
    def files(self) -> dict[str, Path]:
        """The files that a bundle takes along, by their path in torch's folder."""
        found = {}
        for path in sorted(self.torch.rglob("*")):
            inside = path.relative_to(self.torch)
            kept = inside.parts[0] not in _NOT_KEPT and path.suffix not in (".lock", ".tmp", ".part")
            if kept and is_file_path(inside.as_posix()) and path.is_file() and not path.is_symlink():
                found[inside.as_posix()] = path
        return found

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(path.stat().st_size for path in self.files.values())

    @property
    def name(self) -> str:
        """The name of its bundle: the folder's, and a digest of the names and sizes of its files."""
        listed = [(name, path.stat().st_size) for name, path in self.files.items()]
        return self.folder.name + sha256_of(json.dumps(listed).encode())[:32]

    @property
    def taken(self) -> set[str]:
        """The names of the bundles that were imported into it."""
        with contextlib.suppress(OSError):
            return set((self.folder / _TAKEN).read_text(encoding="ascii").split())
        return set()

    def note_taken(self, name: str) -> None:
        """Note that a bundle was imported."""
        with open_append(self.folder / _TAKEN) as taken:
            taken.write(f"{name}\n".encode("ascii"))

    @property
    def uses(self) -> int:
        """How many processes have used it."""
        path = self.folder / _USES
        return path.stat().st_size if path.exists() else 0

    @property
    def used(self) -> float:
        """When it was made or used last, in seconds since 1970."""
        times = [path.stat().st_mtime for path in (self.folder / _USES, self.folder / _ABOUT) if path.exists()]
        return max(times, default=0.0)

    def differences(self, here: Mapping[str, str]) -> list[str]:
        """Name the versions and hardware that are others here, each with both values."""
        return differences(self.fits, here)

    def stale(self, here: Mapping[str, str]) -> str:
        """Return why the code will hardly be used any more; empty where it may be."""
        if differing := self.differences(here):
            return f"made for {', '.join(differing)}"
        days = (time.time() - self.used) / 86_400
        return f"unused for {days:.0f} days" if days > _UNUSED_DAYS else ""


def differences(theirs: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Name the versions and hardware that are others here, each with both values."""
    return [
        f"{name} {theirs.get(name, 'unknown')} (here {value})"
        for name, value in here.items()
        if theirs.get(name) != value
    ]


def is_file_path(path: Any) -> bool:
    """Return whether a value is a relative path of plain names that stays inside its folder."""
    plain = r"[A-Za-z0-9_.+=,@-]+(/[A-Za-z0-9_.+=,@-]+)*"
    return isinstance(path, str) and bool(re.fullmatch(plain, path)) and ".." not in PurePosixPath(path).parts


def sha256_of(text: bytes) -> str:
    """Return the checksum of a content."""
    return hashlib.sha256(text).hexdigest()


class CompiledStore:
    """All folders of compiled code of this user.

    Args:
        folder: it is made with the first entry.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def entries(self) -> list[Entry]:
        """Return the entries that this user alone can have written, the most recently used first."""
        found = []
        for folder in self.folder.glob("*") if self.folder.is_dir() else ():
            try:
                files.check_folder(self.folder)
                files.check_folder(folder)
                found.append(_read(folder))
            except FileNotFoundError:  # another process has cleared it
                continue
            except (OSError, ValueError) as error:
                _log.warning("compiled code in %s is not used: %s", folder, error)
        return sorted(found, key=lambda entry: entry.used, reverse=True)

    def make(self, here: Mapping[str, str], models: Mapping[str, str]) -> Entry:
        """Return the entry of a set of models; its folder is made the first time.

        Raises:
            OSError: it cannot be made, or another user may write to it.
        """
        key = sha256_of(json.dumps([sorted(here.items()), sorted(models)]).encode())[:32]
        entry = Entry(self.folder / key, dict(here), dict(models))
        for folder in (self.folder, entry.folder, entry.torch):
            files.make_folder(folder)
            folder.chmod(0o700)
        if not (entry.folder / _ABOUT).exists():
            about = {"schema": SCHEMA_VERSION, "fits": entry.fits, "models": entry.models}
            files.replace(entry.folder / _ABOUT, json.dumps(about).encode())
        return entry

    def clear(self, doomed: Callable[[Entry], bool]) -> list[tuple[str, int]]:
        """Remove entries; return the name and size of each."""
        gone = []
        for entry in self.entries():
            if doomed(entry):
                gone.append((entry.name, entry.size))
                shutil.rmtree(entry.folder, ignore_errors=True)
        return gone


def _read(folder: Path) -> Entry:
    about = json.loads(files.read_own(folder / _ABOUT, _MOST_ABOUT_BYTES))
    if not isinstance(about, dict) or about.get("schema") != SCHEMA_VERSION:
        raise ValueError(f"{_ABOUT} is not of schema {SCHEMA_VERSION}")
    return Entry(folder, *(text_table(about.get(name)) for name in ("fits", "models")))


def text_table(table: Any) -> dict[str, str]:
    """Return a table of texts.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(table, dict) or not all(isinstance(text, str) for pair in table.items() for text in pair):
        raise ValueError("no table of versions, hardware or models")
    return table


def compiled_store() -> CompiledStore | None:
    """Return the store of compiled code of this user; None where nothing is to be kept (`files.default_folder`)."""
    try:
        folder = files.default_folder()
    except RuntimeError as error:
        _log.warning("compiled code is not kept: %s", error)
        return None
    return None if folder is None else CompiledStore(folder / "compiled")


@contextlib.contextmanager
def shared_compiles(*models: torch.nn.Module) -> Iterator[Path | None]:
    """Have torch keep what is compiled in the block in this user's folder for these models, where later processes look.

    Blocks may be nested and repeated. Yields torch's folder. Yields None, and changes nothing, where
    ``$HOTLOOP_CACHE_DIR`` is empty, or where the user chose a folder for torch by ``$TORCHINDUCTOR_CACHE_DIR``.

    Args:
        models: the models that will be compiled.
    """
    before, store = os.environ.get(VARIABLE), compiled_store()
    place = None if store is None or _is_users_choice(before, store) else _opened(store, models)
    if place is None:
        yield None
        return
    os.environ[VARIABLE] = str(place)
    try:
        with _no_headers_of_others():
            yield place
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _is_users_choice(chosen: str | None, store: CompiledStore) -> bool:
    """Return whether torch's folder is neither ours nor its default, which torch itself writes into the environment."""
    if chosen is None or store.folder in Path(chosen).parents:
        return False
    path = Path(chosen)
    return path.parent != Path(tempfile.gettempdir()) or not path.name.startswith("torchinductor_")


def _opened(store: CompiledStore, models: tuple[torch.nn.Module, ...]) -> Path | None:
    """Return torch's folder for models; None where it cannot be used, which is said."""
    try:
        entry = store.make(fits(), {fingerprint(model): type(model).__qualname__ for model in models})
        with open_append(entry.folder / _USES) as uses:
            uses.write(b".")  # which needs no lock
    except OSError as error:
        _log.warning("compiled code is not kept: %s. The run goes on.", error)
        return None
    return entry.torch


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
