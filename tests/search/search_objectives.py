"""Trials without a recipe: what the tests of the search's machinery run."""

from __future__ import annotations

import json
import math
import os
import signal
import time


def quadratic(asked):
    """Best at a learning rate of 1e-4; three reports."""
    value = 0.0
    for step in range(1, 4):
        value = -((math.log10(asked.values["training.learning_rate"]) + 4) ** 2) * step / 3
        asked.report(step, value)
    asked.folder.mkdir(parents=True, exist_ok=True)
    with (asked.folder / "ran.jsonl").open("a") as file:
        file.write(json.dumps({"pid": os.getpid(), "values": dict(asked.values)}) + "\n")
    return value


def meets_another(asked):
    """The first two trials wait for each other: each worker has one of them, however late it began."""
    _begin(asked, 2)
    return quadratic(asked)


def _begin(asked, together):
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "began").touch()
    while sum(1 for _ in asked.folder.parent.glob("*/began")) < together:
        time.sleep(0.05)


def fails(asked):
    raise RuntimeError("planted: no trial can work")


def every_third_fails(asked):
    if asked.number % 3 == 0:
        raise RuntimeError(f"planted in trial {asked.number}")
    return float("nan") if asked.number % 3 == 1 else quadratic(asked)


def kills_its_worker_once(asked):
    """Trial 1 takes its worker with it."""
    if asked.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def always_kills(asked):
    """Any trial with the values of trial 1 takes its worker with it."""
    place = asked.folder.parents[1] / "deadly"
    if asked.number == 1:
        place.write_text(json.dumps(dict(asked.values)))
    if place.exists() and json.loads(place.read_text()) == dict(asked.values):
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def waits_for_a_kill(asked):
    """Trials from the third on wait until the test says so."""
    _begin(asked, 1)
    while asked.number > 1 and not (asked.folder.parents[1] / "go").exists():
        time.sleep(0.05)
    return quadratic(asked)
