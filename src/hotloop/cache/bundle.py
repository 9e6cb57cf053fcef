"""Bundles of compiled code: what one machine compiled, for others of its kind. A bundle is code: take in your own.

A zip file: ``manifest.json`` with versions, hardware, models and the checksum of each file, ``manifest.sha256`` with
the manifest's own, and the files by their checksums. The checksums tell a damaged bundle from a whole one. They do not
tell whose it is: for that, compare the manifest's checksum with what the export printed.
"""

from __future__ import annotations

import dataclasses
import os
import time
import zipfile
from typing import TYPE_CHECKING

from hotloop.cache.compiled import MAX_BYTES, CompiledStore, File, Manifest, name_of
from hotloop.cache.keys import fits
from hotloop.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_MANIFEST, _CHECKSUM = "manifest.json", "manifest.sha256"
_MAX_MANIFEST_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Bundle:
    """What was written or taken in: the manifest's checksum, and what it says."""

    checksum: str
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(one.size for one in self.manifest.files)


def export(store: CompiledStore, target: Path, model: str | None = None) -> Bundle:
    """Write what fits this machine into a bundle.

    Args:
        store: where it is kept.
        target: the file to write; it is there whole or not at all.
        model: the fingerprint, or its beginning, of the model whose code is wanted; None takes all.

    Raises:
        DataError: nothing is kept that fits, or the file cannot be written.
    """
    here = fits()
    entries = [one.manifest for one in store.entries() if not one.manifest.differences(here)]
    known = {name: kind for one in entries for name, kind in one.models.items()}
    if model is not None:
        entries = [one for one in entries if any(name.startswith(model) for name in one.models)]
    wanted = {file.path: file for one in reversed(entries) for file in one.files}
    content = {file: text for file in wanted.values() if (text := store.read(file)) is not None}
    if not content:
        raise DataError(_nothing(model, known))
    models = {name: kind for one in entries for name, kind in one.models.items()}
    manifest = Manifest(here, models, time.time(), tuple(sorted(content, key=lambda one: one.path)))
    text = manifest.dumps()
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle:
            bundle.writestr(_MANIFEST, text)
            bundle.writestr(_CHECKSUM, name_of(text))
            for digest, data in {file.digest: data for file, data in content.items()}.items():
                bundle.writestr(f"objects/{digest}", data)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"the bundle {target} cannot be written: {error}") from error
    return Bundle(name_of(text), manifest)


def take_in(store: CompiledStore, source: Path, *, checksum: str | None = None, model: str | None = None) -> Bundle:
    """Check a bundle and keep what is in it.

    Args:
        store: where to keep it.
        source: the bundle. It is code that will run here: take in only what you made yourself.
        checksum: what the export printed, or its beginning; None believes the bundle.
        model: the fingerprint, or its beginning, of the model that it is to be for.

    Raises:
        DataError: it cannot be read, is damaged, or does not fit; the message says which part.
        OSError: it cannot be kept.
    """
    try:
        with zipfile.ZipFile(source) as bundle:
            text = _member(bundle, _MANIFEST, _MAX_MANIFEST_BYTES)
            manifest = _checked(text, _member(bundle, _CHECKSUM, 1024), source)
            _refuse_misfit(manifest, name_of(text), source, checksum, model)
            content = {file.digest: _object(bundle, file, source) for file in manifest.files}
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{source} is no bundle that can be read: {error}") from error
    except Exception as error:  # zlib's errors have no class of their own that zipfile promises
        raise DataError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    store.put(manifest, lambda file: content[file.digest])
    return Bundle(name_of(text), manifest)


def _checked(text: bytes, said: bytes, source: Path) -> Manifest:
    if name_of(text).encode() != said.strip():
        raise DataError(f"{source}: the manifest is not what its checksum says: it was damaged or changed")
    try:
        return Manifest.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: {error}") from error


def _refuse_misfit(manifest: Manifest, name: str, source: Path, checksum: str | None, model: str | None) -> None:
    if checksum is not None and not (checksum and name.startswith(checksum.strip().lower())):
        raise DataError(f"{source}: its manifest has the checksum {name}, expected {checksum}: it is not that bundle")
    if differs := manifest.differences(fits()):
        raise DataError(f"{source} does not fit this machine: it was made for {', '.join(differs)}")
    if model is not None and not (model and any(one.startswith(model) for one in manifest.models)):
        raise DataError(f"{source}: it was not made for the model {model}, but for {_names(manifest.models.items())}")
    if (size := sum(one.size for one in manifest.files)) > MAX_BYTES:
        raise DataError(f"{source}: its files have {size:,} bytes, expected {MAX_BYTES:,} at most")


def _object(bundle: zipfile.ZipFile, file: File, source: Path) -> bytes:
    data = _member(bundle, f"objects/{file.digest}", file.size)
    if len(data) != file.size or name_of(data) != file.digest:
        raise DataError(f"{source}: {file.path} is not what the manifest says: the bundle is damaged")
    return data


def _member(bundle: zipfile.ZipFile, name: str, limit: int) -> bytes:
    """Read a member, and no more than it may have: a zip can say anything of its sizes."""
    try:
        with bundle.open(name) as member:
            data = member.read(limit + 1)
    except KeyError:
        raise DataError(f"{bundle.filename} has no {name}: it is no bundle of hotloop's") from None
    if len(data) > limit:
        raise DataError(f"{bundle.filename}: {name} has more than {limit:,} bytes")
    return data


def _names(models: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name[:12]} ({kind})" for name, kind in models) or "none that is named"


def _nothing(model: str | None, known: dict[str, str]) -> str:
    if model is None:
        return "no compiled code is kept that fits this machine: run `hotloop train` with compile first"
    return f"no compiled code is kept for the model {model}; there is some for {_names(known.items())}"
