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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import HotloopError, SearchStoppedError, StepLostError
from hotloop.train import child, configure
from hotloop.train.child import DONE, INTERRUPTED, REPLACE
from hotloop.train.cluster import connected
from hotloop.train.search import told
from hotloop.train.search.study import Study
from hotloop.train.search.trial import settings_of
from hotloop.train.search.work import Part, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.search.told import Told
    from hotloop.train.search.work import Objective
    from hotloop.train.settings import Settings

STOPPED = 3
"""Exit code: the search cannot go on."""


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
    events = child.events()
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
        with contextlib.closing(study.storage), _objective(job, settings) as objective:
            Worker(study, tell, objective, part).run()
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


@contextlib.contextmanager
def _objective(job: Job, settings: Settings) -> Iterator[Objective]:
    """Return what runs a trial: in this process, or on the cluster."""
    if settings.hpo.engine == "ray":
        from hotloop.train.search.away import Away  # noqa: PLC0415 - not where trials run here

        with connected(settings_of(settings, {}, Path(job.folder)), "hpo.engine") as cluster:
            yield Away(cluster, job.objective, Path(job.folder, "workers", f"{job.number}.log"))
        return
    module, _, function = job.objective.partition(":")
    yield getattr(importlib.import_module(module), function)


def _end_with_parent() -> None:
    """Stop as by Ctrl-C when stdin ends: whoever started this process is dead, and nobody would stop it."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        child.interrupt_again()

    threading.Thread(target=wait, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main(Job(**json.loads(sys.stdin.readline()))))
