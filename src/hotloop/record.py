"""The run record: one versioned JSON document of a run, written as the run goes and readable after a kill.

Lines are appended to ``record.jsonl`` the moment something happens; ``record.json`` is the same as one document,
replaced atomically at most every five seconds (more seldom once that would cost over 2% of the time). After ``kill -9``
the lines are ahead of the document, so `load` prefers them.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from hotloop.errors import RecordError, RunPrunedError

SCHEMA_VERSION = 1
SNAPSHOT_SECONDS = 5.0
SNAPSHOT_SHARE = 0.02
"""Of the run's time, what replacing the document may cost: the interval grows with the document."""
DOCUMENT, LINES = "record.json", "record.jsonl"
ERROR_LENGTH = 4000
"""Characters kept of the error that ended a run: torch's compile errors can be megabytes."""

LISTS = ("steps", "metrics", "events", "decisions", "verdicts", "advice")
"""Sections that grow by one entry a line."""
MAPPINGS = ("environment", "settings", "told", "components", "measurements")
"""Sections of which a line updates some keys."""
_SINCE = ("advice", "told")
"""Sections that older records of this schema do not have."""

_log = logging.getLogger(__name__)


def empty() -> dict[str, Any]:
    """Give a document of the current schema with nothing in it."""
    return {
        "schema": SCHEMA_VERSION,
        "status": "running",
        "created": None,
        "updated": None,
        "finished": None,
        "error": None,
        "starts": 0,
        "idle_seconds": 0.0,
        **{name: {} for name in MAPPINGS},
        **{name: [] for name in LISTS},
    }


class RunRecord:
    """A run record that is being written. Use it as a context manager: leaving it settles the run's status.

    Sections (all plain JSON data):

    - ``environment``, ``settings`` (those that the run reads), ``told`` (lines that it said before its first step, by
      subject: ``data``, ``model``, ...), ``components`` (name to the status's dictionary), ``measurements``
      (``cold_seconds``, ``steady_step_ms``, ``peak_memory_bytes``, ...): mappings, by `update`;
    - ``steps`` (``step``, ``seconds``, ``loss``, ``learning_rate``, ``running``), ``metrics`` (``step``, ``epoch``,
      ``split`` and the metrics), ``events`` (`hotloop.events.Event.to_dict` with the ``step``), ``decisions``,
      ``verdicts``, ``advice`` (`hotloop.diagnose.Advice.to_dict`): lists, by `append`.

    ``status`` is ``running``, ``finished``, ``interrupted``, ``pruned`` or ``failed``; a record that says ``running``
    with no process behind it was killed (`was_killed`). Opening a folder that holds a record goes on with it:
    ``starts`` counts how often, and ``idle_seconds`` sums up the time between two starts in which nothing ran.

    A full or failing disk is reported once on the log and never stops the run. Calls from several threads are safe.

    Args:
        folder: where it is written; None keeps it in memory only.

    Raises:
        RecordError: the folder holds something that is no record, or one of a newer schema.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._lock = threading.RLock()
        self._warned = False
        self._snapshot_at, self._snapshot_cost = -math.inf, 0.0
        has_lines, known = False, None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            has_lines = _mend_torn_tail(self.folder / LINES)
            known = load(self.folder) if has_lines else _load_if_there(self.folder / DOCUMENT)
        self._head = known or empty()
        # Entries are held as their JSON text: a fraction of the memory of dictionaries, and a snapshot need not encode
        # them again, so that it costs a fraction of a second even after a million steps.
        self._texts = {name: bytearray(_joined(self._head.pop(name))) for name in LISTS}
        self._lines = cast("BinaryIO", io.BytesIO() if self.folder is None else (self.folder / LINES).open("ab"))
        if known and not has_lines:
            self._write_line({"set": self.document})
        started = {"schema": SCHEMA_VERSION, "status": "running", "finished": None, "error": None}
        now, starts = time.time(), self._head.get("starts") or 0
        created, last = self._head["created"] or now, self._head.get("updated") or now
        idle = (self._head.get("idle_seconds") or 0.0) + max(0.0, now - last)
        self._set(**started, **this_process(), created=created, starts=starts + 1, idle_seconds=idle)

    @property
    def document(self) -> dict[str, Any]:
        """The whole document as it is now: a copy, made at each access (seconds for a million steps)."""
        with self._lock:
            return cast("dict[str, Any]", json.loads(b"".join(self._pieces())))

    def append(self, section: str, /, entry: Mapping[str, Any]) -> None:
        """Add one entry to a list section, on disk when this returns."""
        if section not in LISTS:
            raise ValueError(f"section {section!r} is no list of the record: expected one of {', '.join(LISTS)}")
        text = _dumps(entry)
        with self._lock:
            self._write_line({"append": section}, entry=text)
            texts = self._texts[section]
            texts += b", " + text if texts else text
            self._snapshot_if_due()

    def update(self, section: str, /, **values: Any) -> None:
        """Set some keys of a mapping section, on disk when this returns."""
        if section not in MAPPINGS:
            raise ValueError(f"section {section!r} is no mapping of the record: expected one of {', '.join(MAPPINGS)}")
        plain = json.loads(_dumps(values))
        with self._lock:
            self._write_line({"update": section, "values": plain})
            self._head[section].update(plain)
            self._snapshot_if_due()

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Settle the run's status and write the document a last time. Calling it again does nothing."""
        with self._lock:
            if self._lines.closed:
                return
            self._set(status=status, error=error and error[:ERROR_LENGTH], finished=time.time())
            if self.folder is not None:
                with self._tolerant():
                    self.snapshot(durable=True)
            with self._tolerant():
                self._lines.close()

    def snapshot(self, *, durable: bool = False) -> Path:
        """Replace ``record.json`` atomically by what is known now, and return its path.

        Args:
            durable: wait for the disk as well, so that it outlives a power cut; a killed process needs no such wait.

        Raises:
            OSError: the document cannot be written.
            ValueError: the record is kept in memory.
        """
        if self.folder is None:
            raise ValueError("this run record is kept in memory: it has no folder to write a document in")
        path = self.folder / DOCUMENT
        part = path.with_suffix(".json.part")
        with self._lock:
            began = time.monotonic()
            with part.open("wb") as file:
                file.writelines(self._pieces())
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            part.replace(path)
            self._snapshot_at = time.monotonic()
            self._snapshot_cost = self._snapshot_at - began
        return path

    def _snapshot_if_due(self) -> None:
        interval = max(SNAPSHOT_SECONDS, self._snapshot_cost / SNAPSHOT_SHARE)
        if self.folder is not None and time.monotonic() - self._snapshot_at >= interval:
            with self._tolerant():
                self.snapshot()

    def _pieces(self) -> Iterator[bytes | bytearray]:
        """Give the document's text in pieces, the long ones without a copy."""
        yield _dumps(self._head)[:-1]
        for name, texts in self._texts.items():
            yield f', "{name}": ['.encode()
            yield texts
            yield b"]"
        yield b"}"

    def _set(self, **values: Any) -> None:
        self._write_line({"set": values})
        self._head.update(values)
        self._snapshot_if_due()

    def _write_line(self, line: dict[str, Any], entry: bytes = b"") -> None:
        if self._lines.closed:
            where = f"in {self.folder}" if self.folder is not None else "in memory"
            raise ValueError(f"the run record {where} is finished: nothing can be added to it")
        self._head["updated"] = time.time()
        if self.folder is None:
            return
        text = _dumps({"time": self._head["updated"], **line})
        if entry:
            text = text[:-1] + b', "entry": ' + entry + b"}"
        # What a failing flush leaves in Python's buffer is written by the next one that succeeds.
        with self._tolerant():
            self._lines.write(text + b"\n")
            self._lines.flush()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Say once that the disk fails, and go on: a record is never worth the run that it describes."""
        try:
            yield
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("The run record in %s cannot be written: %s. The run goes on.", self.folder, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
        elif isinstance(error, KeyboardInterrupt):
            self.finish("interrupted", type(error).__name__)
        elif isinstance(error, RunPrunedError):
            self.finish("pruned", str(error))
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")


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


def was_killed(document: Mapping[str, Any]) -> bool:
    """Whether a record says ``running`` with its process gone; False where that cannot be known (another machine)."""
    pid = document.get("pid")
    if document.get("status") != "running" or type(pid) is not int or pid <= 0:
        return False
    if document.get("host") not in {None, platform.node()} or os.name == "nt":  # on Windows, os.kill(pid, 0) would kill
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return document.get("process_started") != _process_started(pid)  # another process has got the number since


def runs_elsewhere(document: Mapping[str, Any]) -> bool:
    """Whether another process of this machine is at work on a record; False where that cannot be known."""
    if document.get("status") != "running" or document.get("host") != platform.node():
        return False
    return document.get("pid") != os.getpid() and not was_killed(document)


def to_json(value: Any) -> str:
    """Give data as JSON text in the record's way: NaN and infinity, which JSON has none of, as strings."""
    return _dumps(value).decode("ascii")


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
    return {**{name: section for name, section in empty().items() if name in _SINCE}, **document}


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


def _load_if_there(path: Path) -> dict[str, Any] | None:
    return load(path) if path.exists() else None


def _mend_torn_tail(lines: Path) -> bool:
    """End the half line that a kill can leave, so that the next append has a line of its own.

    Returns:
        Whether the file held a whole line before: a run can be killed before it wrote its first.
    """
    if not lines.exists():
        return False
    with lines.open("rb+") as file:
        first = file.readline()
        if first:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return first.endswith(b"\n")


def this_process() -> dict[str, Any]:
    """Give what tells this process apart from all others: its number, its machine, and when it started."""
    pid = os.getpid()
    return {"pid": pid, "host": platform.node(), "process_started": _process_started(pid)}


def _process_started(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot (Linux); it tells apart two that had the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(fields.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _joined(entries: list[dict[str, Any]]) -> bytes:
    return b", ".join(_dumps(entry) for entry in entries)


def _dumps(value: Any) -> bytes:
    return json.dumps(_finite(value), default=_plain, allow_nan=False).encode("ascii")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf", and stay visible."""
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
    """Make JSON of what json does not know: numbers of other libraries by their ``item()``, all else by its text."""
    with contextlib.suppress(Exception):  # whatever another library raises, a record is no reason to stop
        item = _finite(value.item())
        if isinstance(item, str | int | float | None):
            return item
    return str(value)
