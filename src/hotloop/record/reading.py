"""Reads a run record back: its lines, which are ahead after a kill, or its document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import RecordError
from hotloop.record.schema import DOCUMENT, LINES, LISTS, MAPPINGS, SCHEMA_VERSION, SINCE, empty

if TYPE_CHECKING:
    import os


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a run record from its folder, its ``record.json`` or its ``record.jsonl``; a torn last line is left out.

    Raises:
        RecordError: nothing is there, it is no run record, or its schema is newer than this version reads.
    """
    path = Path(path)
    try:
        document = _load_lines(path) if (path := _find(path)).suffix == ".jsonl" else _load_document(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    _check(document, path)
    return document


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in (LINES, DOCUMENT):
        if (path / name).is_file():
            return path / name
    raise RecordError(
        f"no run record at {path}: expected a folder with {LINES} or {DOCUMENT}, or one of these files; "
        "`hotloop train` makes one in runs/RECIPE/DATE, Loop(record=FOLDER) in FOLDER"
    )


def _load_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is not a readable run record: {error}") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path} is no run record: expected a JSON object, found {type(document).__name__}")
    return {**{name: section for name, section in empty().items() if name in SINCE}, **document}


def _load_lines(path: Path) -> dict[str, Any]:
    document = empty()
    unread = 0
    with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                _apply(document, json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                unread += 1  # a kill leaves at most one torn line a start; the count is shown, not hidden
    if document.get("created") is None:
        raise RecordError(f"{path} holds no line of a run record")
    if unread:
        document["unread_lines"] = unread
    return document


def _apply(document: dict[str, Any], line: dict[str, Any]) -> None:
    """Apply one line to the document: the only place that knows what a line means."""
    if "append" in line:
        # Interned keys: a million steps would otherwise hold five million copies of five words.
        document[line["append"]].append({sys.intern(key): value for key, value in line["entry"].items()})
    elif "update" in line:
        document[line["update"]].update(line["values"])
    else:
        document.update(line["set"])
    document["updated"] = line["time"]


def _check(document: dict[str, Any], path: Path) -> None:
    schema = document.get("schema")
    if type(schema) is not int or not 1 <= schema <= SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema {schema!r}; this version of hotloop reads 1 to {SCHEMA_VERSION}: "
            "is it a run record, and is hotloop up to date?"
        )
    wrong = [name for name in LISTS if not _are_objects(document.get(name))]
    wrong += [name for name in MAPPINGS if not isinstance(document.get(name), dict)]
    if "components" not in wrong and not _are_objects(list(document["components"].values())):
        wrong.append("components")
    if wrong:
        raise RecordError(f"{path} is no run record: {', '.join(wrong)} missing or of another type")


def _are_objects(entries: object) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
