"""Bundles of compiled code: what one machine compiled, for other machines of its kind.

A bundle is code: import only your own. It is a zip file: ``manifest.json`` with versions, hardware, models and the
checksum of each file, ``manifest.sha256`` with the manifest's own checksum, and the files by their checksums. The
checksums show whether a bundle is damaged. They do not show who made it: for that, compare the manifest's checksum with
what the export printed.
"""

from __future__ import annotations

import dataclasses
import time
import zipfile
from typing import TYPE_CHECKING

from hotloop.cache.compiled import MAX_BYTES, MAX_MANIFEST_BYTES, CompiledStore, File, Manifest, sha256_of
from hotloop.cache.keys import fits
from hotloop.errors import DataError
from hotloop.files import whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

_MANIFEST, _CHECKSUM = "manifest.json", "manifest.sha256"


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A bundle that was exported or imported: its manifest, and the manifest's checksum."""

    checksum: str
    manifest: Manifest

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return self.manifest.size


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
    entries = [entry.manifest for entry in store.entries() if not entry.manifest.differences(here)]
    known = {name: kind for entry in entries for name, kind in entry.models.items()}
    if model is not None:
        entries = [entry for entry in entries if any(name.startswith(model) for name in entry.models)]
    wanted = {file.path: file for entry in reversed(entries) for file in entry.files}
    content = {file: text for file in wanted.values() if (text := store.read(file)) is not None}
    if not content and model is None:
        raise DataError("no compiled code is kept that fits this machine: run `hotloop train` with compile first")
    if not content:
        raise DataError(f"no compiled code is kept for the model {model}; there is some for {_names(known.items())}")
    models = {name: kind for entry in entries for name, kind in entry.models.items()}
    manifest = Manifest(here, models, time.time(), tuple(sorted(content, key=lambda file: file.path)))
    return write_bundle(manifest, {file.digest: data for file, data in content.items()}, target)


def write_bundle(manifest: Manifest, content: Mapping[str, bytes], target: Path) -> Bundle:
    """Write files into a bundle.

    Args:
        manifest: the files, and what they fit to.
        content: what each file holds, by its checksum.
        target: the file to write; it is there whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    text = manifest.dumps()
    try:
        with (
            whole(target, durable=False, shared=True) as part,
            zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            archive.writestr(_MANIFEST, text)
            archive.writestr(_CHECKSUM, sha256_of(text))
            for digest, data in content.items():
                archive.writestr(f"objects/{digest}", data)
    except OSError as error:
        raise DataError(f"the bundle {target} cannot be written: {error}") from error
    return Bundle(sha256_of(text), manifest)


def import_bundle(
    store: CompiledStore, source: Path, *, checksum: str | None = None, model: str | None = None
) -> Bundle:
    """Check a bundle and keep its files.

    Args:
        store: where to keep them.
        source: the bundle. It is code that will run here: import only bundles that you made yourself.
        checksum: what the export printed, or its beginning; None trusts the bundle.
        model: the fingerprint, or its beginning, of the model that the bundle must be for.

    Raises:
        DataError: it cannot be read, is damaged, or does not fit; the message says which part.
        OSError: it cannot be kept.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            bundle = _read_manifest(archive, source)
            _refuse_misfit(bundle, source, checksum, model)
            content = {file.digest: _read_file(archive, file, source) for file in bundle.manifest.files}
    except DataError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise DataError(f"{source} is no bundle that can be read: {error}") from error
    except Exception as error:  # zlib's errors have no class of their own that zipfile promises
        raise DataError(f"{source} is damaged: {type(error).__name__}: {error}") from error
    store.put(bundle.manifest, lambda file: content[file.digest])
    return bundle


def _read_manifest(archive: zipfile.ZipFile, source: Path) -> Bundle:
    text = _member(archive, _MANIFEST, MAX_MANIFEST_BYTES)
    checksum = sha256_of(text)
    if checksum.encode() != _member(archive, _CHECKSUM, 1024).strip():
        raise DataError(f"{source}: the manifest is not what its checksum says: it was damaged or changed")
    return Bundle(checksum, Manifest.loads(text))


def _refuse_misfit(bundle: Bundle, source: Path, checksum: str | None, model: str | None) -> None:
    name, manifest = bundle.checksum, bundle.manifest
    if checksum is not None and not (checksum and name.startswith(checksum.strip().lower())):
        raise DataError(f"{source}: its manifest has the checksum {name}, expected {checksum}: it is not that bundle")
    if differs := manifest.differences(fits()):
        raise DataError(f"{source} does not fit this machine: it was made for {', '.join(differs)}")
    if model is not None and not (model and any(known.startswith(model) for known in manifest.models)):
        raise DataError(f"{source}: it was not made for the model {model}, but for {_names(manifest.models.items())}")
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
