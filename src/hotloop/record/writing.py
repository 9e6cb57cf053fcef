"""Writes a run record as the run goes: lines at once, the document at the end."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

from hotloop.errors import RunPrunedError
from hotloop.files import open_append, open_regular, whole
from hotloop.record.format import DOCUMENT, LINES, LISTS, MAPPINGS, SCHEMA, empty
from hotloop.record.process import this_process
from hotloop.record.reading import LONGEST, load
from hotloop.record.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ERROR_LENGTH = 4000
"""Characters kept of the error that ended a run: torch's compile errors can be megabytes."""

_log = logging.getLogger("hotloop.record")


class RunRecord:
    """A run record that is being written. Use it as a context manager, which sets the run's status when it is left.

    Sections (all plain JSON data):

    - ``environment``, ``settings`` (the settings that the run reads), ``told`` (lines that the run printed before its
      first step, by subject: ``data``, ``model``, ...), ``components`` (name to the status's dictionary),
      ``measurements`` (``cold_seconds``, ``steady_step_ms``, ``peak_memory_bytes``, ...): mappings, by `update`;
    - ``steps`` (``step``, ``seconds``, ``loss``, ``learning_rate``, ``running``), ``metrics`` (``step``, ``epoch``,
      ``split`` and the metrics), ``events`` (`hotloop.events.Event.to_dict` with the ``step``), ``decisions``,
      ``verdicts``, ``advice`` (`hotloop.diagnose.Advice.to_dict`): lists, by `append`.

    ``status`` is ``running``, ``finished``, ``interrupted``, ``pruned`` or ``failed``; a record that says ``running``
    with no process behind it was killed (`was_killed`). Opening a folder that holds a record continues it: ``starts``
    counts how often, and ``idle_seconds`` is the time between starts in which nothing ran.

    A full or failing disk is reported once on the log and never stops the run; a folder that cannot be written from the
    start leaves the record in memory. Calls from several threads are safe.

    Args:
        folder: where to write the record; None keeps it in memory only.

    Raises:
        RecordError: the folder holds something that is no record, or a record of a newer schema.
        OSError: the path cannot be a folder, since a file is in its way.
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._lock = threading.RLock()
        self._warned = False
        has_lines, known = False, None
        self._lines = cast("BinaryIO", io.BytesIO())
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                has_lines = _mend_torn_tail(self.folder / LINES)
                if has_lines or (self.folder / DOCUMENT).exists():
                    known = load(self.folder if has_lines else self.folder / DOCUMENT)
                self._lines = open_append(self.folder / LINES)
        except (FileExistsError, NotADirectoryError):
            raise  # a wrong name, which is told before the first step
        except OSError as error:
            _log.warning(
                "record=%s cannot be written: %s. The run goes on, with its record in memory. To have it on disk, make"
                " room, change the folder's permissions, or name another folder.", self.folder, error,
            )  # fmt: skip
            self.folder = None
        self._head = known or empty()
        self._counts = {name: len(self._head[name]) for name in LISTS}
        # Entries are held as their JSON text, which takes a fraction of the memory of dictionaries.
        self._texts = {name: bytearray(to_json(self._head.pop(name))[1:-1].encode("ascii")) for name in LISTS}
        self._unwritten = bytearray()
        """Lines that the disk has not taken yet."""
        if known and not has_lines:
            self._write_line({"set": self.document})
        started = {"schema": SCHEMA.version, "status": "running", "finished": None, "error": None}
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
        text = to_json(entry).encode("ascii")
        with self._lock:
            self._write_line({"append": section}, entry=text)
            texts = self._texts[section]
            texts += b", " + text if texts else text
            self._counts[section] += 1

    def lengths(self) -> dict[str, int]:
        """Return how many entries each list section has: what a checkpoint keeps for `cut`."""
        with self._lock:
            return dict(self._counts)

    def cut(self, lengths: Mapping[str, int], step: int) -> dict[str, int]:
        """Leave out what was recorded after a checkpoint that the run goes back to, and mark it in ``cuts``.

        The lines themselves stay in ``record.jsonl``.

        Args:
            lengths: of the sections, when the checkpoint was written; a section that is not named is left out whole.
            step: of the checkpoint, for the mark.

        Returns:
            How many entries are left out, by section.
        """
        with self._lock:
            kept = {name: min(lengths.get(name, 0), self._counts[name]) for name in LISTS}
            gone = {name: self._counts[name] - kept[name] for name in LISTS if self._counts[name] > kept[name]}
            if not gone:
                return {}
            cuts = [*self._head.get("cuts", ()), {"step": step, "time": time.time(), **gone}]
            self._write_line({"cut": kept, "set": {"cuts": cuts}})
            self._head["cuts"] = cuts
            for name in gone:
                entries = json.loads(b"[" + self._texts[name] + b"]")[: kept[name]]
                self._texts[name] = bytearray(to_json(entries)[1:-1].encode("ascii"))
            self._counts = kept
            return gone

    def update(self, section: str, /, **values: Any) -> None:
        """Set some keys of a mapping section, on disk when this returns."""
        if section not in MAPPINGS:
            raise ValueError(f"section {section!r} is no mapping of the record: expected one of {', '.join(MAPPINGS)}")
        plain = json.loads(to_json(values))
        with self._lock:
            self._write_line({"update": section, "values": plain})
            self._head[section].update(plain)

    def finish(self, status: str = "finished", error: str | None = None) -> None:
        """Set the run's final status and write the document a last time. Calling it again does nothing."""
        with self._lock:
            if self._lines.closed:
                return
            self._set(status=status, error=error and error[:ERROR_LENGTH], finished=time.time())
            with self._tolerant():
                self._lines.close()
            # Somebody may have removed the folder while the run went on: then nothing is written there.
            if self.folder is not None and (self.folder / LINES).exists():
                with self._tolerant(), whole(self.folder / DOCUMENT) as file:
                    file.writelines(self._pieces())

    def _pieces(self) -> Iterator[bytes | bytearray]:
        """Yield the document's text in pieces, the long ones without a copy."""
        yield to_json(self._head)[:-1].encode("ascii")
        for name, texts in self._texts.items():
            yield f', "{name}": ['.encode()
            yield texts
            yield b"]"
        yield b"}"

    def _set(self, **values: Any) -> None:
        self._write_line({"set": values})
        self._head.update(values)

    def _write_line(self, line: dict[str, Any], entry: bytes = b"") -> None:
        if self._lines.closed:
            where = f"in {self.folder}" if self.folder is not None else "in memory"
            raise ValueError(f"the run record {where} is finished: nothing can be added to it")
        self._head["updated"] = time.time()
        if self.folder is None:
            return
        text = to_json({"time": self._head["updated"], **line}).encode("ascii")
        if entry:
            text = text[:-1] + b', "entry": ' + entry + b"}"
        # A full disk may take half a line: the rest of it, and all lines behind, are written once there is room.
        self._unwritten += text + b"\n"
        with self._tolerant():
            while self._unwritten:
                del self._unwritten[: self._lines.write(self._unwritten)]

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Log the first failure of the disk and continue: a record is never worth the run that it describes."""
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


def _mend_torn_tail(lines: Path) -> bool:
    """End the half line that a kill can leave, so that the next append has a line of its own.

    Returns:
        Whether the file held a whole line before: a run can be killed before it wrote its first.
    """
    if not lines.exists():
        return False
    with open_regular(lines, change=True) as file:
        first = file.readline(LONGEST)
        if first:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
    return first.endswith(b"\n")
