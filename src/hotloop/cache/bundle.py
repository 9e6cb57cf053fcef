"""Bundles of compiled code: what one machine compiled, for other machines of its kind.

A bundle is code: import only your own. It is a zip file: ``manifest.json`` with versions, hardware, and for each set of
models its files with their checksums, ``manifest.sha256`` with the manifest's own checksum, and the files by their
checksums. The checksums show whether a bundle is damaged. They do not show who made it: for that, compare the
manifest's checksum with what the export printed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zipfile
from typing import TYPE_CHECKING, Any

from hotloop.cache import files
from hotloop.cache.compiled import SCHEMA_VERSION, differences, is_file_path, sha256_of, text_table
from hotloop.cache.keys import fits
from hotloop.errors import DataError
from hotloop.files import whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from hotloop.cache.compiled import CompiledStore, Entry

MAX_BYTES = 8 * 2**30
"""Of the files of a bundle."""
_MAX_MANIFEST_BYTES = 16 * 2**20
_MANIFEST, _CHECKSUM = "manifest.json", "manifest.sha256"
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class File:
    """One file of a compile cache: its path in torch's folder, the checksum of its content, and its bytes."""

    path: str
    digest: str
    size: int


@dataclasses.dataclass(frozen=True)
class Part:
    """The code for one set of models: their classes by fingerprint, and the files."""

    models: Mapping[str, str]
    files: tuple[File, ...]


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle that was exported or imported.

    Args:
        checksum: the manifest's.
        fits: versions and hardware, by name.
        parts: the code, by set of models.
    """

    checksum: str
    fits: Mapping[str, str]
    parts: tuple[Part, ...]

    @property
    def models(self) -> dict[str, str]:
        """The classes of all models, by fingerprint."""
        return {name: kind for part in self.parts for name, kind in part.models.items()}

    @property
    def files(self) -> list[File]:
        """All files."""
        return [file for part in self.parts for file in part.files]

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.size for file in self.files)


def export_bundle(store: CompiledStore, target: Path, model: str | None = None) -> Bundle:
    """Write the compiled code that fits this machine into a bundle.

    Args:
        store: where the code is kept.
        target: the file to write; it is there whole or not at all.
        model: the fingerprint, or its beginning, of the model whose code is wanted; None takes all.

    Raises:
        DataError: nothing is kept that fits, or the file cannot be written.
    """
    here = fits()
    entries = [entry for entry in store.entries() if not entry.differences(here) and entry.files]
    known = {name: kind for entry in entries for name, kind in entry.models.items()}
    if model is not None:
        entries = [entry for entry in entries if any(name.startswith(model) for name in entry.models)]
    if not entries and model is None:
        raise DataError("no compiled code is kept that fits this machine: run `hotloop train` with compile first")
    if not entries:
        raise DataError(f"no compiled code is kept for the model {model}; there is some for {_names(known.items())}")
    return write_bundle(entries, target)


def write_bundle(entries: Sequence[Entry], target: Path) -> Bundle:
    """Write the code of some entries, which all fit to the same, into a bundle.

    Raises:
        DataError: the file cannot be written.
    """
    content: dict[str, bytes] = {}
    parts = []
    try:
        for entry in entries:
            listed = []
            for name, path in entry.files.items():
                data = path.read_bytes()
                listed.append(File(name, sha256_of(data), len(data)))
                content[listed[-1].digest] = data
            parts.append(Part(entry.models, tuple(listed)))
        rows = [{"models": part.models, "files": [dataclasses.astuple(file) for file in part.files]} for part in parts]
        text = json.dumps({"schema": SCHEMA_VERSION, "fits": entries[0].fits, "parts": rows}).encode()
        with (
            whole(target, durable=False, shared=True) as made,
            zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            archive.writestr(_MANIFEST, text)
            archive.writestr(_CHECKSUM, sha256_of(text))
            for digest, data in content.items():
                archive.writestr(f"objects/{digest}", data)
    except OSError as error:
        raise DataError(f"the bundle {target} cannot be written: {error}") from error
    return Bundle(sha256_of(text), entries[0].fits, tuple(parts))


def import_bundle(
    store: CompiledStore, source: Path, *, checksum: str | None = None, model: str | None = None, name: str = ""
) -> Bundle:
    """Check a bundle and keep its files. A file that is there already stays: its process may have loaded it.

    Args:
        store: where to keep them.
        source: the bundle. It is code that will run here: import only bundles that you made yourself.
        checksum: what the export printed, or its beginning; None trusts the bundle.
        model: the fingerprint, or its beginning, of the model that the bundle must be for.
        name: what a share calls the bundle; noted, so that it is not taken again.

    Raises:
        DataError: it cannot be read, is damaged, or does not fit; the message says which part.
        OSError: it cannot be kept.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            bundle = _read_manifest(archive, source)
            _refuse_misfit(bundle, source, checksum, model)
            content = {file.digest: _read_file(archive, file, source) for file in bundle.files}
    except DataError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise DataError(f"{source} is no bundle that can be read: {error}") from error
    except Exception as error:  # zlib's errors have no class of their own that zipfile promises
        raise DataError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    for part in bundle.parts:
        entry = store.make(bundle.fits, part.models)
        for file in part.files:
            target = entry.torch / file.path
            if not os.path.lexists(target):
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.replace(target, content[file.digest])
                target.chmod(0o700 if target.suffix == ".so" else 0o600)
        if name:
            entry.note_taken(name)
    return bundle


def _read_manifest(archive: zipfile.ZipFile, source: Path) -> Bundle:
    text = _member(archive, _MANIFEST, _MAX_MANIFEST_BYTES)
    checksum = sha256_of(text)
    if checksum.encode() != _member(archive, _CHECKSUM, 1024).strip():
        raise DataError(f"{source}: the manifest is not what its checksum says: it was damaged or changed")
    document = json.loads(text)
    if document["schema"] != SCHEMA_VERSION:
        raise DataError(f"{source}: expected schema {SCHEMA_VERSION}, found {document['schema']!r}")
    parts = [
        Part(text_table(part["models"]), tuple(_file(*row) for row in part["files"])) for part in document["parts"]
    ]
    return Bundle(checksum, text_table(document["fits"]), tuple(parts))


def _file(path: Any, digest: Any, size: Any) -> File:
    if not is_file_path(path) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or type(size) is not int:
        raise ValueError(f"a manifest with a file that cannot be: {path!r}")
    return File(path, digest, size)


def _refuse_misfit(bundle: Bundle, source: Path, checksum: str | None, model: str | None) -> None:
    name, models = bundle.checksum, bundle.models
    if checksum is not None and not (checksum and name.startswith(checksum.strip().lower())):
        raise DataError(f"{source}: its manifest has the checksum {name}, expected {checksum}: it is not that bundle")
    if differs := differences(bundle.fits, fits()):
        raise DataError(f"{source} does not fit this machine: it was made for {', '.join(differs)}")
    if model is not None and not (model and any(known.startswith(model) for known in models)):
        raise DataError(f"{source}: it was not made for the model {model}, but for {_names(models.items())}")
    if bundle.size > MAX_BYTES:
        raise DataError(f"{source}: its files have {bundle.size:,} bytes, expected {MAX_BYTES:,} at most")


def _read_file(archive: zipfile.ZipFile, file: File, source: Path) -> bytes:
    data = _member(archive, f"objects/{file.digest}", file.size)
    if len(data) != file.size or sha256_of(data) != file.digest:
        raise DataError(f"{source}: {file.path} is not what the manifest says: the bundle is damaged")
    return data


def _member(archive: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Read a member, and no more than its limit: a zip file can claim any size."""
    try:
        with archive.open(name) as member:
            data = member.read(limit + 1)
    except KeyError:
        raise DataError(f"{archive.filename} has no {name}: it is no bundle of hotloop's") from None
    if len(data) > limit:
        raise DataError(f"{archive.filename}: {name} has more than {limit:,} bytes")
    return data


def _names(models: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name[:12]} ({kind})" for name, kind in models) or "none that is named"
