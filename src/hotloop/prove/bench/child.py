"""One way from cold, in a process of its own: nothing is compiled, no library set up, and no cache is filled yet.

Run as ``python -m hotloop.prove.bench.child FOLDER``; the folder holds the order (`ORDER`) and gets the report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.cache.ambient import apply_process_settings, process_settings
from hotloop.errors import ConfigError
from hotloop.prove.bench.way import NotRunError, Ready, start
from hotloop.step.workload import load_factory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROGRAM = "hotloop.prove.bench.child"
INSIDE = "HOTLOOP_BENCH"
"""Set in the child's environment, so that a file which benches when it is imported does not do so there."""
ORDER, REPORT, LOG = "order.pickle", "report.json", "log.txt"
LIMIT_SECONDS = 1800.0
"""Of a way that gets ready: autotuning a large model takes many minutes."""
_REASON_LENGTH = 2000
_LOG_LINES = 4
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "", "TRITON_CACHE_DIR": "triton"}
"""The variables that name the folders of compile caches, and what each is called in a folder of ours."""
_BOOT = (
    "import json, runpy, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "sys.argv[1:] = [given['folder']]; runpy.run_module(given['program'], run_name='__main__')"
)


class CannotStartError(Exception):
    """The program cannot be made in another process; the message says why."""


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Have compile caches in a folder while the block runs."""
    before = {name: os.environ.get(name) for name in _CACHES}
    os.environ.update(_environment(folder))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_cold(name: str, factory: str, folder: Path, *, limit_seconds: float = LIMIT_SECONDS) -> Ready:
    """Get a way ready in a new process, whose compile caches are in the folder.

    Args:
        name: of the way.
        factory: the name of the function that makes the workload.
        folder: that nobody else uses; an empty one has empty caches.
        limit_seconds: after which the way is given up.

    Raises:
        NotRunError: the way does not run as asked here, or its process was killed.
        CannotStartError: the process cannot make the workload.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    order = {"way": name, "factory": factory, "settings": process_settings()}
    (folder / ORDER).write_bytes(pickle.dumps(order))
    path = [str(Path(place).absolute()) for place in sys.path]  # an empty entry means here
    given = json.dumps({"path": path, "folder": str(folder), "program": PROGRAM})
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-c", _BOOT, given],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_environment(folder), INSIDE: "1"},
            start_new_session=True,  # with its compile workers it is one group, which is killed at the end
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise NotRunError(f"it was not ready after {limit_seconds:,.0f} s{_because(folder)}") from None
        finally:
            _end(process)
    return _result(folder, code)


def main(folder: Path) -> None:
    """Do what the order says, and write the report: the figures, or why there are none."""
    order = pickle.loads((folder / ORDER).read_bytes())  # noqa: S301 - the parent's, in a folder of its own
    apply_process_settings(order["settings"])
    try:
        make = load_factory(order["factory"])
    except Exception as error:  # noqa: BLE001 - the user's file may raise anything where it is imported again
        found: dict[str, Any] = {"cannot": _reason(error)}
    else:
        try:
            running, ready = start(order["way"], make, alone=True)
            running.close()
            found = dataclasses.asdict(ready)
        except (NotRunError, ConfigError) as error:
            found = {"reason": str(error)[:_REASON_LENGTH]}
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is why the way does not run
            found = {"reason": _reason(error)}
    part = folder / f"{REPORT}.part"
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(folder / REPORT)
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)  # with the compile workers, and without waiting for what the user's code would end


def _result(folder: Path, code: int) -> Ready:
    try:
        found: Mapping[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
            ended += "; the machine may be out of memory" if ended.endswith("SIGKILL") else ""
        else:
            ended = f"ended with code {code}"
        raise NotRunError(f"its process {ended}{_because(folder)}") from None
    if "cannot" in found:
        raise CannotStartError(found["cannot"])
    if "reason" in found:
        raise NotRunError(found["reason"])
    return Ready(**found)


def _environment(folder: Path) -> dict[str, str]:
    return {name: str(folder / "caches" / part) for name, part in _CACHES.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a child that has not ended itself, with its compile workers."""
    if process.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _because(folder: Path) -> str:
    """Give the last lines of the log."""
    text = (folder / LOG).read_text(encoding="utf-8", errors="replace")[-_REASON_LENGTH:]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {' | '.join(lines[-_LOG_LINES:])}" if lines else ""


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_REASON_LENGTH]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
