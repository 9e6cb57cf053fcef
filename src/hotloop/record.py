"""The run record: one versioned JSON document of a run, written as the run goes and readable after a kill.

Lines are appended to ``record.jsonl`` the moment something happens; ``record.json`` is the same as one document, replaced
atomically at most every five seconds. After ``kill -9`` the lines are ahead of the document, so `load` prefers them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any, Self

from hotloop.errors import RecordError

SCHEMA_VERSION = 1
SNAPSHOT_SECONDS = 5.0
DOCUMENT, LINES = "record.json", "record.jsonl"

LISTS = ("steps", "metrics", "events", "decisions", "verdicts")
"""Sections that grow by one entry a line."""
MAPPINGS = ("environment", "settings", "components", "measurements")
"""Sections of which a line updates some keys."""


def empty() -> dict[str, Any]:
    """Give a document of the current schema with nothing in it."""
    return {
        "schema": SCHEMA_VERSION,
        "status": "running",
        "created": None,
        "updated": None,
        "finished": None,
        "error": None,
        **{name: {} for name in MAPPINGS},
        **{name: [] for name in LISTS},
    }


class RunRecord:
    """A run record that is being written. Use it as a context manager: leaving it settles the run's status.

    Sections (all plain JSON data):

    - ``environment``, ``settings``, ``components`` (name to the status's dictionary), ``measurements``
      (``cold_seconds``, ``steady_step_ms``, ``peak_memory_bytes``, ...): mappings, by `update`;
    - ``steps`` (``step``, ``seconds``, ``loss``, ``learning_rate``, ``running``), ``metrics`` (``step``, ``epoch``,
      ``split`` and the metrics), ``events`` (`hotloop.events.Event.to_dict` with the ``step``), ``decisions``,
      ``verdicts``: lists, by `append`.

    ``status`` is ``running``, ``finished``, ``interrupted`` or ``failed``; a record that says ``running`` with no process
    behind it was killed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = self.folder / LINES
        self.document = load(self.folder) if lines.exists() else empty()
        self._mend_torn_tail(lines)
        self._lines: IO[str] = lines.open("a", encoding="utf-8")
        self._snapshot_at = 0.0
        started: dict[str, Any] = {"schema": SCHEMA_VERSION, "status": "running", "finished": None, "error": None}
        if self.document["created"] is None:
            started["created"] = time.time()
        self._write({"set": {**started, "pid": os.getpid()}})

    @staticmethod
    def _mend_torn_tail(lines: Path) -> None:
        """A kill can leave half a line: end it, so that the next append starts on a line of its own."""
        if lines.exists() and (data := lines.read_bytes()) and not data.endswith(b"\n"):
            with lines.open("ab") as file:
                file.write(b"\n")

    def append(self, section: str, entry: dict[str, Any]) -> None:
        """Add one entry to a list section, on disk when this returns."""
        if section not in LISTS:
            raise ValueError(f"section {section!r} is no list of the record: expected one of {', '.join(LISTS)}")
        self._write({"append": section, "entry": entry})

    def update(self, section: str, **values: Any) -> None:
        """Set some keys of a mapping section, on disk when this returns."""
        if section not in MAPPINGS:
            raise ValueError(f"section {section!r} is no mapping of the record: expected one of {', '.join(MAPPINGS)}")
        self._write({"update": section, "values": values})

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Settle the run's status and write the document a last time. Calling it again does nothing."""
        if self._lines.closed:
            return
        self._write({"set": {"status": status, "error": error, "finished": time.time()}})
        self.snapshot()
        self._lines.close()

    def snapshot(self) -> Path:
        """Replace ``record.json`` atomically by what is known now, and return its path."""
        path = self.folder / DOCUMENT
        part = path.with_suffix(".json.part")
        with part.open("w", encoding="utf-8") as file:
            json.dump(self.document, file, default=_plain, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        self._snapshot_at = time.monotonic()
        return path

    def _write(self, line: dict[str, Any]) -> None:
        line = {"time": time.time(), **_finite(line)}
        text = json.dumps(line, default=_plain, allow_nan=False)
        self._lines.write(text + "\n")
        self._lines.flush()
        _apply(self.document, json.loads(text))
        if time.monotonic() - self._snapshot_at >= SNAPSHOT_SECONDS:
            self.snapshot()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        elif isinstance(error, KeyboardInterrupt | SystemExit):
            self.finish("interrupted", type(error).__name__)
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a run record from its folder, its ``record.json`` or its ``record.jsonl``; a torn last line is left out.

    Raises:
        RecordError: nothing is there, it is no run record, or its schema is newer than this version reads.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    lines, whole = folder / LINES, folder / DOCUMENT
    if path.is_file() and path.name != LINES:
        document = _load_document(path)
    elif lines.is_file():
        document = _load_lines(lines)
    elif whole.is_file():
        document = _load_document(whole)
    else:
        raise RecordError(
            f"no run record at {path}: expected a folder with {LINES} or {DOCUMENT}, or one of these files"
        )
    if not isinstance(document.get("schema"), int) or document["schema"] > SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema {document.get('schema')!r}; this version of hotloop reads up to {SCHEMA_VERSION}: "
            "is it a run record, and is hotloop up to date?"
        )
    wrong = [name for name in LISTS if not isinstance(document.get(name), list)]
    wrong += [name for name in MAPPINGS if not isinstance(document.get(name), dict)]
    if wrong:
        raise RecordError(f"{path} is no run record: {', '.join(wrong)} missing or of another type")
    return document


def _load_document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} is not a readable run record: {error}") from error
    if not isinstance(document, dict):
        raise RecordError(f"{path} is no run record: expected a JSON object, found {type(document).__name__}")
    return document


def _load_lines(path: Path) -> dict[str, Any]:
    document = empty()
    unread = 0
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {error}") from error
    for line in text.splitlines():
        try:
            _apply(document, json.loads(line))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            unread += 1  # a kill leaves at most one torn line a run; the count is shown, not hidden
    if document["created"] is None:
        raise RecordError(f"{path} holds no line of a run record")
    if unread:
        document["unread_lines"] = unread
    return document


def _apply(document: dict[str, Any], line: dict[str, Any]) -> None:
    """Apply one line to the document: the only place that knows what a line means."""
    if "append" in line:
        document[line["append"]].append(line["entry"])
    elif "update" in line:
        document[line["update"]].update(line["values"])
    else:
        document.update(line["set"])
    document["updated"] = line["time"]


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf", and stay visible."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Make JSON of what json does not know: numbers of other libraries by their ``item()``, all else by its text."""
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        return _finite(value.item())
    return str(value)
