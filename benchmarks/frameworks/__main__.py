"""Runs each framework's own compile beside ours, or shows what was found.

usage: python -m benchmarks.frameworks [--cpu] [--only ROW[:KIND[:WAY]] ...] [--limit SECONDS] [--caches FOLDER]
                                                      [--out FILE]
       python -m benchmarks.frameworks --plan           what would run
       python -m benchmarks.frameworks --table FILE     the tables of a result file
       python -m benchmarks.frameworks --together FILE  the same ways in one table, without injected failures

Jobs that the result file holds already are not run again: name the same file with --out, and a --limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time

from benchmarks.suite import document as files
from benchmarks.suite.__main__ import LATE, ended, gpu_name

from . import plan, show

_COMPILED = ("inductor", "triton")
"""Folders of compiled code."""
SETTINGS = {
    "precision": {"gpu": "bf16 mixed (lightning-inception: float32)", "cpu": "float32"},
    "matmul_precision": "high, set again before each fit",
    "cold": "seconds from the begin of the first step, each step waited for, in a process and caches of its own: to "
    "the end of the third step, or of the step in which the tier was proven",
    "steady": "fits in turns in one process, forth and back; of each a block of steps after the first ones; medians "
    "with the 95% interval from order statistics (for ratios: of the pairs)",
    "totals": "cold seconds + steps left x steady step; `auto` was really run",
    "failure": "a backward that cannot be compiled; a backward kernel that dies in the middle of the fit",
}


def main(arguments=None):
    """Do what the command line asks."""
    options = parse(arguments)
    if options.child:
        from .child import main as child

        child(json.loads(options.child))
        return 0
    if options.table:
        print(show.tables(load(options.table)))
        return 0
    if options.together:
        print(show.together(load(options.together)))
        return 0
    size = "cpu" if options.cpu else "gpu"
    jobs = plan.choose(plan.jobs(size), options.only)
    if options.plan:
        print("\n".join(job.key for job in jobs))
        return 0
    if not jobs:
        print(f"--only {' '.join(options.only)}: no job is called so; --plan names them", file=sys.stderr)
        return 2
    device = "cpu" if options.cpu else "cuda"
    out = options.out or pathlib.Path(str(files.default_path(device, gpu_name(device))).replace("suite", "frameworks"))
    document = begin(out, device, options.note)
    failed = run_jobs([job for job in jobs if job.key not in document["jobs"]], document, out, options, size)
    print(show.tables(document))
    print(f"{out}: {len(document['jobs'])} jobs, {failed} of this call failed")
    return 0


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frameworks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cpu", action="store_true", help="the subset for a CPU, at small sizes")
    parser.add_argument("--only", action="append", default=[], metavar="ROW[:KIND[:WAY]]", help="jobs to run")
    parser.add_argument("--plan", action="store_true", help="print what would run")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for this call")
    parser.add_argument("--job-limit", type=float, default=570.0, help="seconds for one job (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="the result file; else one in benchmarks/results, of today")
    parser.add_argument(
        "--caches", type=pathlib.Path, help="keep what cold jobs compiled there, for the steady ones of their row"
    )
    parser.add_argument("--note", help="what else a reader of the file should know, as who shares the machine")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="print the tables of a result file")
    parser.add_argument("--together", type=pathlib.Path, metavar="FILE", help="print its ways in one table")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def load(path):
    """Read a result file that is there."""
    return files.load(path, must_be_there=True, results="jobs", kind=dict)


def begin(path, device, note):
    """Read a result file to add to it, or begin a new one."""
    if path.is_file():
        return load(path)
    machine = files.machine(device) | {name: files._version(name) for name in ("lightning", "accelerate")}  # noqa: SLF001
    settings = SETTINGS | ({"note": note} if note else {})
    return {"date": files.today(), "machine": machine, "settings": settings, "jobs": {}}


def run_jobs(jobs, document, out, options, size):
    """Run jobs one by one, each put in the file at once; returns the number of those that failed."""
    start, failed = time.monotonic(), 0
    for place, job in enumerate(jobs, 1):
        left = options.limit - (time.monotonic() - start)
        if left < 1:
            print(f"not begun: {job.key}")
            continue
        why = plan.missing(plan.row_of(job.row))
        found = (
            {"skipped": f"{why} is not installed"}
            if why
            else measured(job, size, min(left, options.job_limit), options.caches)
        )
        if left < options.job_limit and LATE in found.get("error", ""):
            print(f"cut off by --limit, to be run again: {job.key}")
            continue
        failed += "error" in found
        document["jobs"][job.key] = found
        save(document, out)
        print(f"[{place}/{len(jobs)}] {job.key}: {show.in_short(found)}", flush=True)
    return failed


def measured(job, size, limit, kept=None):
    """Run a job in a process and caches of its own; a steady one finds what the row's cold ones have ``kept``."""
    begin_at = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = pathlib.Path(folder, "found.json")
        order = {"job": dataclasses.asdict(job), "size": size, "out": str(out)}
        inductor, triton = _COMPILED
        caches = {"TORCHINDUCTOR_CACHE_DIR": inductor, "TRITON_CACHE_DIR": triton, "HOTLOOP_CACHE_DIR": "hotloop"}
        env = {**os.environ, **{name: str(pathlib.Path(folder, part)) for name, part in caches.items()}}
        shelf = kept / job.row if kept is not None else None
        if job.kind == "steady" and shelf is not None and shelf.is_dir():
            shutil.copytree(shelf, folder, dirs_exist_ok=True)
        error = ended([sys.executable, "-m", "benchmarks.frameworks", "--child", json.dumps(order)], env, limit)
        found = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
        for part in _COMPILED if job.kind == "cold" and shelf is not None else ():
            if pathlib.Path(folder, part).is_dir():
                shutil.copytree(pathlib.Path(folder, part), shelf / part, dirs_exist_ok=True)
    if error or not found:
        found["error"] = error or "the process ended without a result"
    return found | {"process_seconds": round(time.monotonic() - begin_at, 1)}


def save(document, path):
    """Write the document; a killed process leaves the old file or the new one."""
    document["totals"] = show.totals(document["jobs"])
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(files.text(document), encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    sys.exit(main())
