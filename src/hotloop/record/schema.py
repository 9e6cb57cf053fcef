"""The base of what a folder tells of itself: a versioned JSON document, read, checked and written in one way.

A run record, a cross-validation's document and a search's are three `Schema`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import RecordError
from hotloop.files import read, whole

if TYPE_CHECKING:
    import os

LARGEST = 2**30
"""Bytes of a document that is read: a run of a million steps has 200 MB."""


@dataclasses.dataclass(frozen=True)
class Schema:
    """A kind of document.

    Args:
        name: what it is, for messages.
        file: its name in its folder.
        version: the newest that this hotloop reads and writes.
        lists: fields that are lists of objects.
        mappings: fields that are objects.
    """

    name: str
    file: str
    version: int
    lists: tuple[str, ...]
    mappings: tuple[str, ...] = ()

    def is_at(self, path: Path) -> bool:
        """Return whether a path is a folder that holds the document, or the document itself."""
        return (path / self.file).is_file() or (path.name == self.file and path.is_file())

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read a document from its folder, or by its own name.

        Raises:
            RecordError: there is none, it cannot be read, is of another kind, or of a newer schema.
        """
        path = Path(path)
        path = path / self.file if path.is_dir() else path
        try:
            document = json.loads(read(path, LARGEST))
        except (OSError, ValueError, RecursionError) as error:
            raise RecordError(f"{path} is no readable {self.name}: {error}") from error
        if not isinstance(document, dict):
            raise RecordError(f"{path} is no {self.name}: expected a JSON object, found {type(document).__name__}")
        self.check(document, path)
        return document

    def check(self, document: Mapping[str, Any], path: Path) -> None:
        """Refuse a document of another kind, or of a newer version.

        Raises:
            RecordError: naming what is wrong.
        """
        version = document.get("schema")
        if type(version) is not int or not 1 <= version <= self.version:
            raise RecordError(
                f"{path} has schema {version!r}; this version of hotloop reads 1 to {self.version}: is it a "
                f"{self.name}, and is hotloop up to date?"
            )
        wrong = [name for name in self.lists if not are_objects(document.get(name))]
        wrong += [name for name in self.mappings if not isinstance(document.get(name), dict)]
        if wrong:
            raise RecordError(f"{path} is no {self.name}: {', '.join(wrong)} missing or of another type")

    def write(self, folder: Path, document: Mapping[str, Any], *, shared: bool = False) -> None:
        """Write a document, of the newest version, so that the file is always a whole one.

        Raises:
            OSError: it cannot be written; the former stays.
        """
        with whole(folder / self.file, shared=shared) as file:
            file.write(to_json({**document, "schema": self.version}).encode("ascii"))


def are_objects(entries: object) -> bool:
    """Return whether something is a list of objects."""
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)


def to_json(value: Any) -> str:
    """Return data as ASCII JSON text; NaN and infinity, which JSON does not have, become strings."""
    return json.dumps(_finite(value), default=_plain, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by the strings "nan", "inf" and "-inf", so that they stay visible."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((_finite(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know by its ``item()``, if it is another library's number, else by its text."""
    with contextlib.suppress(Exception):  # whatever another library raises, a record is no reason to stop
        item = _finite(value.item())
        if isinstance(item, str | int | float | None):
            return item
    return str(value)
