"""Runs the small programs of the catalogue and makes run-record documents of them: ``python tests/diagnose/diagnose_documents.py``
records all of them anew (or those that are named), with nothing of this machine in them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import torch

import hotloop

HERE = Path(__file__).parent
PROGRAMS, SAVED, WRITTEN = HERE / "programs", HERE / "saved", HERE / "written"
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}|\b\d{12,}\b")
_KEPT = ("events", "components", "measurements", "settings", "environment", "starts")


@contextlib.contextmanager
def _restored():
    """Put back what programs change: the environment, torch's settings, and the compilers that are planted."""
    from hotloop._torch import backends

    environment, threads, planted = dict(os.environ), torch.get_num_threads(), backends.aot_eager
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        backends.aot_eager = planted


def _imported(path):
    """Run a program as a module of its own: what it defines is found by its module's name, as torch looks for it."""
    name = f"program_{path.stem.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document_of(path):
    """Run a program and return its record's document."""
    with _restored(), torch.random.fork_rng(), hotloop.watch() as events:
        torch.manual_seed(0)
        names = vars(_imported(path))
        document = names["loop"].record.document if "loop" in names else {}
        if "model" in names and not document.get("components"):
            document["components"] = hotloop.status(names["model"]).to_dict()["components"]
    return {**document, "events": [event.to_dict() for event in events], "starts": names.get("starts", 1)}


def neutral(document):
    """Return a document without what belongs to this machine or moment: folders, times of day, addresses."""
    kept = {key: document[key] for key in _KEPT if document.get(key)}
    kept.setdefault("events", [])
    for event in kept["events"]:
        event["time"] = 0.0
    text = json.dumps(kept, indent=1)
    text = _ADDRESS.sub("0", text.replace(f"{PROGRAMS}/", ""))
    return re.sub(r'[^"\' ]*/(?=site-packages/)|[^"\' ]*/(?=lib/python3)', "", text) + "\n"


def line_of(path, mark="# here"):
    """Return the number of the line that a program marks as the cause; None if it marks no line."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, start=1) if line.endswith(mark)), None)


if __name__ == "__main__":
    from hotloop.compiling.apply import roots

    for program in [PROGRAMS / f"{name}.py" for name in sys.argv[1:]] or sorted(PROGRAMS.glob("*.py")):
        torch.compiler.reset()
        roots.forget_roots()
        (SAVED / f"{program.stem}.json").write_text(neutral(document_of(program)), encoding="utf-8")
        print(program.stem)
