"""Folders as runs, cross-validations and searches leave them, made without training."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

from hotloop import record
from hotloop.record import RunRecord


def a_run(folder, *, status="finished", goal="max:accuracy", accuracies=(0.5, 0.9, 0.7), submitted=None):
    """Make a run; ``submitted`` is its name on the cluster that it ran on."""
    with mock.patch.dict(os.environ, {record.SUBMITTED: submitted} if submitted else {}):
        written = RunRecord(folder)
    written.update("settings", recipe={"name": "focus", "goal": goal}, training={"learning_rate": 1e-3})
    for step, accuracy in enumerate(accuracies, 1):
        written.append("steps", {"step": step, "seconds": 0.1, "loss": 1.0, "running": "none"})
        written.append("metrics", {"step": step, "split": "validation", "accuracy": accuracy, "loss": 2 - accuracy})
    if status == "running":
        written._lines.close()  # as a kill leaves it
    else:
        written.finish(status, None if status == "finished" else "why it ended")
    return folder


def a_process(root, monkeypatch, *, total=10, done=4):
    """Make a run whose process is this one, as far as the page can tell."""
    written = RunRecord(root / "a")
    written.update("measurements", steps_total=total)
    for step in range(1, done + 1):
        written.append("steps", {"step": step, "seconds": 2.0, "loss": 1.0, "running": "eager"})
    written._lines.close()  # as it is between two of its lines
    told = record.this_process()
    (root / "a" / "run.lock.json").write_text(json.dumps(told))
    monkeypatch.setattr("hotloop.ui.processes._is_ours", lambda pid: pid == told["pid"])
    return told


def a_study(folder, state="complete"):
    folder.mkdir(parents=True)
    trial = {"number": 0, "state": state, "value": 0.9, "values": {"program.lr": 0.1}, "began": 5.0}
    found = {"schema": 1, "kind": "study", "name": "focus/search", "metric": "accuracy", "left": 0, "best": 0}
    (folder / "study.json").write_text(json.dumps({**found, "trials": [trial]}))
    return folder


def a_cross_validation(folder, status="finished"):
    for number in (0, 1):
        a_run(folder / f"fold-{number}")
    each = [{"fold": number, "status": "finished", "step": 3, "compiled": {"running": "eager"}} for number in (0, 1)]
    found = {"schema": 1, "recipe": "focus", "created": 7.0, "status": status, "settings": {}, "contents": []}
    metrics = {"best": {"accuracy": {"mean": 0.8, "std": 0.1}}}
    (folder / "kfold.json").write_text(json.dumps({**found, "folds": each, "metrics": metrics}))
    return folder


@contextmanager
def training(folder):
    """Let a process work in a run's folder that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "hotloop = __import__('time').sleep(100_000)"])
    try:
        a_run(folder, status="running")
        told = {**record.this_process(), "pid": process.pid, "process_started": record.process.started(process.pid)}
        (folder / "run.lock.json").write_text(json.dumps(told))
        yield process
    finally:
        process.kill()
        process.wait()
