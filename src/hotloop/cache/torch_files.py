"""The files that torch writes into its cache folder: which of them are kept, and which libraries are sound.

For each compile for the CPU torch makes about ten probes: small libraries by which it finds out what compiler and
processor can do together. Compiling them takes longer than all the work that a filled store leaves to do, so they are
kept. A broken probe would say for good that the processor can do nothing, and no code would be vectorised. So a probe
is kept only where it loads here, in a process of its own, as torch itself will load it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop import host
from hotloop.cache.compiled import CHILDREN, MAX_FILE_BYTES, File, is_file_path, sha256_of

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOADER = """
import ctypes, sys
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path)
    except OSError:
        continue
    print(path, flush=True)
"""
_answers: dict[tuple[int, ...], bool] = {}
"""Whether a probe loads, as found out in this process, by the identity of its file."""


def files_in(place: Path, known: Iterable[str]) -> list[tuple[File, Path]]:
    """List the files that torch has written into its cache folder and that are to be kept, with checksums.

    Args:
        place: the folder.
        known: paths in it that are left out, since they were there before.
    """
    # Triton's files hold absolute paths; Inductor bundles them in its entries, and writes them anew from there.
    left_out = ("triton", "locks", "tmp", CHILDREN)
    before, found, probes = set(known), [], []
    for path in sorted(place.rglob("*")):
        inside = path.relative_to(place)
        name = inside.as_posix()
        if name in before or inside.parts[0] in left_out or not is_file_path(name):
            continue
        if path.suffix in (".lock", ".tmp", ".part"):
            continue
        with contextlib.suppress(OSError):  # torch's own temporary files come and go
            if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES:
                content = path.read_bytes()
                if path.suffix == ".so" and not is_whole_library(content):
                    continue
                if path.suffix == ".so" and b"_chk_kernel" in content:  # in the names of a probe's functions
                    probes.append(path)
                found.append((File(name, sha256_of(content), len(content)), path))
    doubtful = set(probes) - _loadable(probes)
    return [(file, path) for file, path in found if path not in doubtful]


def is_whole_library(library: bytes) -> bool:
    """Return whether a library has its table of sections, which linkers write last; a library that was cut has none.

    This is known of ELF files with 64 bits and the lowest byte first. Other formats count as whole.
    """
    # The header: magic, class, byte order, then of the table of sections its place, entry size and count.
    header = struct.Struct("<4sBB34xQ10xHH2x")
    if len(library) < header.size or not library.strip(b"\0"):
        return False
    magic, bits, order, table, size, count = header.unpack_from(library)
    if magic != b"\x7fELF" or (bits, order) != (2, 1):
        return True
    return bool(count > 0 and table > 0 and table + size * count <= len(library))


def _loadable(paths: Iterable[Path]) -> set[Path]:
    """Return the libraries that can be loaded; none where loading cannot be tried. Each file is tried once."""
    asked = {}
    for path in paths:
        with contextlib.suppress(OSError):  # the file may be gone meanwhile
            facts = path.stat()
            asked[path] = facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns
    new = [path for path, identity in asked.items() if identity not in _answers]
    if new:
        loaded = _load_in_child(new)
        _answers.update({asked[path]: path in loaded for path in new})
    return {path for path, identity in asked.items() if _answers[identity]}


def _load_in_child(paths: Iterable[Path]) -> set[Path]:
    """Load all libraries in one process; a library that ends the process leaves none."""
    if not sys.executable:
        return set()
    asked = {str(path): path for path in paths}
    # The probes are linked to torch's own libraries, which the linker has to find.
    spec = importlib.util.find_spec("torch")
    places = [str(Path(place) / "lib") for place in (spec.submodule_search_locations or ())] if spec else []
    if before := os.environ.get("LD_LIBRARY_PATH"):
        places.append(before)
    try:
        done = subprocess.run(  # noqa: S603 - this very Python, and files of this process's own folder
            host.python("-I", "-S", "-c", _LOADER, *asked),
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(places)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60.0,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return set()
    return {asked[line] for line in done.stdout.splitlines() if line in asked} if done.returncode == 0 else set()


def remove_tree(place: Path, *, but: str | None = None) -> None:
    """Remove a folder of torch's with everything in it, except files with a suffix; what cannot be removed stays."""
    for root, folders, names in os.walk(place, topdown=False):
        for name in names:
            if but is None or not name.endswith(but):
                with contextlib.suppress(OSError):
                    Path(root, name).unlink()
        for name in folders:
            with contextlib.suppress(OSError):
                Path(root, name).rmdir()
    with contextlib.suppress(OSError):
        place.rmdir()
