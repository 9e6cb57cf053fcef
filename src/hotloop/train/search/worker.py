"""A worker as a process of its own: ``python -m hotloop.train.search.worker``, started by `supervise`.

The first line of its stdin is its job: a command line is for everybody to see, and a storage has a password. It writes
what it tells to stdout, a line of JSON each; everything else that it prints goes to its log.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import HotloopError, SearchStoppedError, StepLostError
from hotloop.train import configure
from hotloop.train.search import told
from hotloop.train.search.study import Study
from hotloop.train.search.work import Part, Worker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TextIO

    from hotloop.train.search.told import Told

DONE, STOPPED, REPLACE, INTERRUPTED = 0, 3, 4, 130
"""Exit codes: nothing is left; the search cannot go on; this process cannot go on; somebody interrupted."""
_AGAIN_SECONDS = 60.0
"""After which an orphan is asked to stop again, which ends it at once: long enough for a last validation."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a worker is told: the search's settings as plain data, its folder, and what `Part` says."""

    settings: Mapping[str, Any]
    folder: str
    number: int
    since: int
    deadline: float
    objective: str

    def to_json(self) -> str:
        """Return the report as a line."""
        return json.dumps(dataclasses.asdict(self))


def main(job: Job) -> int:
    """Run a worker to its end, and give its exit code."""
    events = _events()
    _end_with_parent()
    # A program that was started in the background ignores Ctrl-C, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def tell(what: Told) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever listened is gone; the trial's own end is written down
            events.write(json.dumps(told.to_dict(what)) + "\n")
            events.flush()

    try:
        settings = configure.from_dict(job.settings)
        study = Study(settings, Path(job.folder), lambda line: tell(told.Said(line, job.number)), job.since)
        part = Part(job.number, job.deadline)
        Worker(study, tell, _objective(job.objective), part).run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except StepLostError:
        return REPLACE
    except HotloopError as error:
        again = (
            "" if isinstance(error, SearchStoppedError) else ". No trial is lost: mend it, and the same command goes on"
        )
        tell(told.Said(f"{str(error).rstrip('.')}{again}", job.number, stops=True))
        return STOPPED
    return DONE


def _objective(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _events() -> TextIO:
    """Keep stdout for what is told: what recipes and libraries print goes where stderr goes."""
    sys.stdout.flush()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


def _end_with_parent() -> None:
    """Stop as by Ctrl-C when stdin ends: whoever started this process is dead, and nobody would stop it."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        while True:  # whatever swallows a signal: this process is not to outlive its search
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(_AGAIN_SECONDS)

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Job(**json.loads(sys.stdin.readline()))))
