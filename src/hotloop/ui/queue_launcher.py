"""Becomes the next run of a queue: ``python -m hotloop.ui.queue_launcher FOLDER``.

It chooses under the queue's lock, so that several servers start a run once. A server that is killed takes it not along.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hotloop.ui import processes
from hotloop.ui.places import LOG, Places
from hotloop.ui.queue import Queue


def main(root: str) -> None:
    """Take the next run, and go on as its process; do nothing where it is no run's turn."""
    places = Places(Path(root))
    entry = Queue(places).take()
    if entry is None:
        return
    with processes.open_log(places.root / entry.name / LOG) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(entry.directory)
    command = processes.command(["hotloop", *entry.arguments])
    os.execv(command[0], command)  # noqa: S606 - our own program, without a shell


if __name__ == "__main__":
    main(sys.argv[1])
