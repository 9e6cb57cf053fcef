"""The result file: one JSON document, dated, that names hardware, versions and settings, and is added to row by row."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import tempfile

from . import totals
from .plan import HARD, LEFT_OUT, WORKLOADS

RESULTS = pathlib.Path(__file__).parents[1] / "results"
_VERSIONS = ("triton", "transformers", "torchvision", "diffusers", "peft")
_SAME = ("gpu", "processor", "torch")
"""Facts that have to agree for rows to be in the same file."""


def machine(device):
    """Name hardware and versions."""
    import torch

    import hotloop

    found = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "hotloop": hotloop.__version__,
        "commit": commit(),
    }
    return found | {name: _version(name) for name in _VERSIONS}


def processor():
    """Name the processor, where the system tells."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit():
    """Name the commit that is measured, if it is known."""
    try:
        asked = ["git", "-C", str(RESULTS), "describe", "--always", "--dirty"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def _version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def today():
    """Return the date, as files carry it."""
    return dt.datetime.now(tz=dt.UTC).date().isoformat()


def default_path(device, name):
    """Return the path for a run of today: ``DATE-GPU-suite.json``."""
    if device != "cuda":
        return RESULTS / f"{today()}-cpu-suite.json"
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word not in ("", "nvidia", "tesla", "geforce")]
    return RESULTS / f"{today()}-{words[0] if words else 'gpu'}-suite.json"


def load(path, *, must_be_there=False, results="rows", kind=list):
    """Read a result file; an empty document where there is none.

    Args:
        path: the file.
        must_be_there: whether there has to be one.
        results: under which name its results are.
        kind: what they are, a list or a dictionary.

    Raises:
        ValueError: it is no file of the suite, or not there though it must be.
    """
    if not path.is_file():
        if must_be_there:
            raise ValueError(f"{path}: there is no such file: expected a result file of the suite")
        return {results: kind()}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    known = isinstance(found, dict) and isinstance(found.get(results), kind)
    if not known:
        raise ValueError(
            f"{path}: expected a result file of the suite, which is JSON with a {kind.__name__} of {results}"
        )
    return found


def begin(path, device, settings):
    """Read a result file to add to it, or begin a new one.

    Raises:
        SystemExit: its rows come from other hardware or another torch.
    """
    document, here = load(path), machine(device)
    if not document["rows"]:
        return {"date": today(), "machine": here, "settings": settings, "left_out": LEFT_OUT, "rows": []}
    other = [name for name in _SAME if document["machine"].get(name) != here[name]]
    if other:
        had = {name: document["machine"].get(name) for name in other}
        raise SystemExit(f"{path}: its rows were measured with {had}; choose another file with --out")
    return document


def done(document):
    """Return the keys of the rows that the document holds."""
    return {row["row"] for row in document["rows"]}


def add(document, key, results):
    """Put a row's results into the document, in place of earlier ones of the same row."""
    document["rows"] = [row for row in document["rows"] if row["row"] != key] + results
    machine_ = document.get("machine", {})
    if (now := commit()) != machine_.get("commit"):
        machine_["later_commits"] = sorted({*machine_.get("later_commits", ()), now} - {None})


def save(document, path):
    """Write the document with its summary; a killed process leaves either the old file or the new one."""
    summarise(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text(document))
    pathlib.Path(file.name).chmod(0o644)
    pathlib.Path(file.name).replace(path)


def text(document):
    """Return the document as JSON with one line for each short list, so that a file can be read and compared."""
    lines = json.dumps(document, indent=1)
    return re.sub(r"\[\s+([^][{}]*?)\s+\]", lambda found: "[" + re.sub(r"\n\s*", " ", found[1]) + "]", lines) + "\n"


def summarise(document):
    """Compute totals and checks from the rows."""
    held = {row["workload"] for row in document["rows"]}
    names = [name for name in (*WORKLOADS, *HARD, "diffusion") if name in held]
    document["totals"] = totals.table(document["rows"], names)
    document["checks"] = totals.checks(document["rows"])
