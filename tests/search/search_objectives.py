"""Trials without a recipe: what the tests of the search's machinery run."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path


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


def meets_two_others(asked):
    _begin(asked, 3)
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
    """The first attempt of trial 1 takes its worker with it."""
    if asked.number == 1 and _is_first(asked):
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def always_kills(asked):
    if asked.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return quadratic(asked)


def swallows_the_first_interrupt(asked):
    """Trial 0 waits for Ctrl-C, and something in it takes that for its own; the others wait for one as well."""
    try:
        if asked.number == 0:
            asked.folder.mkdir(parents=True, exist_ok=True)
            (asked.folder / "waits").touch()
            time.sleep(600)
    except KeyboardInterrupt:
        return quadratic(asked)
    time.sleep(600)
    return quadratic(asked)


def sees(asked):
    """Leaves the GPUs that its worker sees; of several workers each has a trial."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    _begin(asked, 1 if seen == "all" else 2)
    (asked.folder / "gpus").write_text(seen)
    return 1.0


def kills_its_ray_worker_once(asked):
    """The first attempt of trial 1 loses the process of Ray's that started this one."""
    return _without(asked, os.getppid)


def kills_its_node_once(asked):
    """The first attempt of trial 1 takes its node of the cluster with it."""
    return _without(asked, lambda: int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]))


def loses_much(asked):
    """The first attempts of some trials lose their process, that of Ray's, and their node."""
    if _is_first(asked) and asked.number in (20, 40, 60):
        if asked.number == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        worker = os.getppid()
        node = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker if asked.number == 40 else node, signal.SIGKILL)
        time.sleep(600)
    return quadratic(asked)


def _is_first(asked):
    """Whether this is a trial's first attempt: a third one, after an interruption, is not to kill again."""
    return asked.folder.name == f"{asked.number:04d}"


def _without(asked, victim):
    if asked.number == 1 and _is_first(asked):
        os.kill(victim(), signal.SIGKILL)
        time.sleep(600)
    return quadratic(asked)


def waits_for_a_kill(asked):
    """Trials from the third on wait until the test says so."""
    _begin(asked, 1)
    while asked.number > 1 and not (asked.folder.parents[1] / "go").exists():
        time.sleep(0.05)
    return quadratic(asked)
