"""Worker processes: each runs one function of ours in a process of its own, with its GPUs, and tells how it ended.

A worker stops as by Ctrl-C when its stdin ends: whoever started it is dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import errors, host
from hotloop.errors import HotloopError
from hotloop.files import open_append, read, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.settings import Settings

VISIBLE = "CUDA_VISIBLE_DEVICES"
_AGAIN_SECONDS = 60.0
"""After which an orphan is asked to stop again, which ends it at once: long enough for a last validation."""
_GRACE_SECONDS = 600.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a worker ended.

    Args:
        number: the worker's.
        result: what its function returned.
        error: what it raised, one of our errors or KeyboardInterrupt.
        died: how its process died, where it neither returned nor raised.
    """

    number: int
    result: Any = None
    error: BaseException | None = None
    died: str = ""


class Workers:
    """Worker processes on this machine.

    Args:
        function: ``module:function`` that each runs.
        folder: has their logs and results.
    """

    def __init__(self, function: str, folder: Path) -> None:
        self._function, self._folder = function, folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def running(self) -> list[int]:
        """The numbers of those that run."""
        return list(self._running)

    def log(self, number: int) -> Path:
        """Return the file that has the output of a worker."""
        return self._folder / f"{number}.log"

    def start(self, number: int, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """Start a worker; Ctrl-C reaches it through us alone."""
        self._folder.mkdir(parents=True, exist_ok=True)
        result = self._folder / f"{number}.json"
        result.unlink(missing_ok=True)
        job = {"function": self._function, "arguments": dict(arguments), "result": str(result)}
        with open_append(self.log(number)) as log:
            process = subprocess.Popen(  # noqa: S603 - this very program
                host.python("-m", "hotloop.train.workers"),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self._running[number] = process
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once; `ended` says so
            process.stdin.write(json.dumps(job).encode() + b"\n")  # a command line is for everybody to see
            process.stdin.flush()

    def ended(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        return [self._end(number) for number, one in list(self._running.items()) if one.poll() is not None]

    def interrupt(self) -> None:
        """Ask all to stop, as Ctrl-C does."""
        for one in self._running.values():
            with contextlib.suppress(OSError):
                one.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Leave no worker behind."""
        self.interrupt()
        until = time.monotonic() + _GRACE_SECONDS
        for one in self._running.values():
            try:
                one.wait(max(0.1, until - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                one.kill()
                one.wait()
        self._running.clear()

    def _end(self, number: int) -> Ended:
        process = self._running.pop(number)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            return ended(number, json.loads(read(self._folder / f"{number}.json")))
        except (OSError, ValueError):
            lines = self.log(number).read_text(errors="replace").strip().splitlines()
            said = f": {lines[-1]}" if lines and process.returncode > 0 else ""
            return Ended(number, died=f"{how(process.returncode)}{said}")


def ended(number: int, told: Mapping[str, Any]) -> Ended:
    """Return how a worker ended, by what `called` gave."""
    if told["error"] is None:
        return Ended(number, told["result"])
    kind = KeyboardInterrupt if told["error"] == "KeyboardInterrupt" else getattr(errors, told["error"])
    return Ended(number, error=kind(told["text"]))


def called(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a function, and return its result, or our error, as plain data."""
    module, _, name = function.partition(":")
    try:
        return {"error": None, "result": getattr(importlib.import_module(module), name)(**arguments)}
    except (HotloopError, KeyboardInterrupt) as error:
        return {"error": type(error).__name__, "text": str(error)}


def how(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def names() -> list[str]:
    """Return the GPUs that this process may use, each as CUDA_VISIBLE_DEVICES names it."""
    import torch  # noqa: PLC0415 - a command that shares nothing out does without

    count = torch.cuda.device_count()
    given = [one.strip() for one in os.environ.get(VISIBLE, "").split(",") if one.strip()]
    return given[:count] if given else [str(number) for number in range(count)]


def shares(settings: Settings) -> list[list[str]]:
    """Return the GPUs of each worker, as many as runs have devices; empty where the settings name other devices."""
    run = settings.run
    if run.device != "auto" or run.accelerator not in ("auto", "cuda"):
        return []
    there, many = names(), run.devices
    return [there[at : at + many] for at in range(0, len(there) - many + 1, many)]


def count(asked: int | str, settings: Settings) -> int:
    """Return how many workers ``auto`` stands for: one for each share of the GPUs, and one where there are none."""
    return max(1, len(shares(settings))) if isinstance(asked, str) else asked


def environment(settings: Settings, workers: int, number: int) -> dict[str, str]:
    """Return the share of the GPUs that a worker has, as a variable; one worker alone has all."""
    there = shares(settings) if workers > 1 else []
    return {VISIBLE: ",".join(there[(number - 1) % len(there)])} if there else {}


def main() -> None:
    """Run a worker."""
    job = json.loads(sys.stdin.readline())
    # A program that was started in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    told = called(job["function"], job["arguments"])
    with whole(Path(job["result"]), durable=False) as file:
        file.write(json.dumps(told).encode())


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    while True:  # whatever swallows a signal, it is not to outlive whoever started it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_AGAIN_SECONDS)


if __name__ == "__main__":
    main()
