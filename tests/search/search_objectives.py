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


def slow(asked):
    time.sleep(0.5)
    return quadratic(asked)


def fails(asked):
    raise RuntimeError("planted: no trial can work")


def every_third_fails(asked):
    if asked.number % 3 == 0:
        raise RuntimeError(f"planted in trial {asked.number}")
    return float("nan") if asked.number % 3 == 1 else quadratic(asked)


def kills_its_worker_once(asked):
    """The first attempt of trial 1 takes its worker with it."""
    if asked.number == 1 and not asked.folder.name.endswith("-2"):
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def always_kills(asked):
    if asked.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def swallows_the_first_interrupt(asked):
    """Trial 0 waits for Ctrl-C, and something in it takes that for its own; the others take a while."""
    try:
        if asked.number == 0:
            asked.folder.mkdir(parents=True, exist_ok=True)
            (asked.folder / "waits").touch()
            time.sleep(60)
    except KeyboardInterrupt:
        return quadratic(asked)
    time.sleep(1)
    return quadratic(asked)
