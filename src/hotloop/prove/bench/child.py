"""Gets one way ready in a process of its own: nothing is compiled, no library is set up, and every cache is empty.

Run as ``python -m hotloop.prove.bench.child FOLDER``. The folder holds the order (`ORDER`), and receives the report.
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

from hotloop import host
from hotloop.cache.ambient import apply_process_settings, process_settings
from hotloop.errors import ConfigError
from hotloop.files import whole
from hotloop.prove.bench.way import NotRunError, Ready, start
from hotloop.step.workload import load_factory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INSIDE = "HOTLOOP_BENCH"
"""Set in the child's environment, so that a file which benches when it is imported does not do so there."""
ORDER, REPORT, LOG = "order.pickle", "report.json", "log.txt"
_REASON_LENGTH, _LOG_LINES = 2000, 4
_BOOT = (
    "import json, runpy, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "sys.argv[1:] = [given['folder']]; runpy.run_module('hotloop.prove.bench.child', run_name='__main__')"
)


class CannotStartError(Exception):
    """The program cannot be made in another process; the message says why."""


def _cache_variables(folder: Path) -> dict[str, str]:
    """Return the variables that move the compile caches into a folder."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "caches"),
        "TRITON_CACHE_DIR": str(folder / "caches" / "triton"),
    }


@contextlib.contextmanager
def caches_in(folder: Path) -> Iterator[None]:
    """Keep the compile caches in a folder while the block runs."""
    variables = _cache_variables(folder)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_cold(name: str, factory: str, folder: Path, *, limit_seconds: float = 1800.0) -> Ready:
    """Get a way ready in a new process, whose compile caches are in the folder.

    Args:
        name: of the way.
        factory: the name of the function that makes the workload.
        folder: that nobody else uses; an empty folder has empty caches.
        limit_seconds: after which the way is given up: autotuning a large model takes many minutes.

    Raises:
        NotRunError: the way does not run as asked here, or its process was killed.
        CannotStartError: the process cannot make the workload.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    order = {"way": name, "factory": factory, "settings": process_settings()}
    (folder / ORDER).write_bytes(pickle.dumps(order))
    path = [str(Path(place).absolute()) for place in sys.path]  # an empty entry means the present folder
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            host.python("-P", "-c", _BOOT, json.dumps({"path": path, "folder": str(folder)})),  # the path is given
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **_cache_variables(folder), INSIDE: "1"},
            start_new_session=True,  # with its compile workers it is one group, which is killed at the end
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise NotRunError(f"it was not ready after {limit_seconds:,.0f} s{_last_lines(folder)}") from None
        finally:
            _end(process)
    return _result(folder, code)


def main(folder: Path) -> None:
    """Execute the order, and write the report: the figures, or the reason why there are none."""
    order = pickle.loads((folder / ORDER).read_bytes())  # noqa: S301 - the parent's, in a folder of its own
    apply_process_settings(order["settings"])
    try:
        make = load_factory(order["factory"])
    except Exception as error:  # noqa: BLE001 - the user's file may raise anything when it is imported again
        report: dict[str, Any] = {"cannot": f"{type(error).__name__}: {error}"[:_REASON_LENGTH]}
    else:
        try:
            running, ready = start(order["way"], make, alone=True)
            running.close()
            report = dataclasses.asdict(ready)
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the reason why the way does not run
            own = isinstance(error, NotRunError | ConfigError)
            report = {"reason": f"{'' if own else f'{type(error).__name__}: '}{error}"[:_REASON_LENGTH]}
    with whole(folder / REPORT, durable=False) as file:
        file.write(json.dumps(report).encode())
    if os.name == "posix":
        os.killpg(0, signal.SIGKILL)  # ends the compile workers too, and waits for nothing of the user's


def _result(folder: Path, code: int) -> Ready:
    try:
        report: Mapping[str, Any] = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
            ended += "; the machine may be out of memory" if ended.endswith("SIGKILL") else ""
        else:
            ended = f"ended with code {code}"
        raise NotRunError(f"its process {ended}{_last_lines(folder)}") from None
    if "cannot" in report:
        raise CannotStartError(report["cannot"])
    if "reason" in report:
        raise NotRunError(report["reason"])
    return Ready(**report)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a child that has not ended, with its compile workers."""
    if process.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _last_lines(folder: Path) -> str:
    """Return the last lines of the log, as the end of a sentence."""
    text = (folder / LOG).read_text(encoding="utf-8", errors="replace")[-_REASON_LENGTH:]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f": {' | '.join(lines[-_LOG_LINES:])}" if lines else ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
