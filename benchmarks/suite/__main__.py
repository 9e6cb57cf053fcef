"""Runs the suite, or shows its plan or its results.

usage: python -m benchmarks.suite [--only WORKLOAD[:WAY,...] ...] [--part PART ...] [--limit SECONDS] [--out FILE]
       python -m benchmarks.suite --plan            what would run, and for about how long
       python -m benchmarks.suite --cpu             the subset for a CPU
       python -m benchmarks.suite --table FILE      the tables of a result file
       python -m benchmarks.suite --write-tables [FILE.json]  the tables of README.md and docs, each from the file that
                                                it names, or from FILE where that is of the same
                                                hardware

Rows that the result file holds already are kept and not run again, so that the suite can be run in parts: name the same
file with --out, and a --limit. Names may have wildcards, and a way may be written as the plan does: --only '*:eager*',
--only 'gpt:auto told 1000 *'.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from . import document as files
from . import plan, show, tables

ROOT = pathlib.Path(__file__).parents[2]
LATE = "not done after"
SETTINGS = {
    "autocast": {"gpu": "bfloat16, but for ppo and vae", "cpu": None},
    "matmul_precision": "high",
    "optimizer": "AdamW, fused",
    "dropout": ["xlmr", "xlmr-lengths", "lora", *plan.LORA, "convnext", "speech", "t5", "deberta", "lstm"],
    "cold": "seconds from the begin of the first step, each step waited for, in a process and compile caches of its "
    "own; torch.compile's ways to the end of the third step, hotloop's until the tier is proven and in force",
    "steady": "12 blocks of each way in turns with an eager twin in the same process; medians, with the 95% interval "
    "from order statistics (for a ratio: of the pairs)",
    "memory": "MB that tensors took (allocated) and that torch held (reserved), at their highest: preparing, over the "
    "first steps, proofs and trials among them; in force, over three steps after that. What a recording holds shows in "
    "reserved alone",
    "totals": "computed = cold seconds + steps left x steady step; what was really run is not marked so. `auto` at "
    "10,000 steps and more is computed from a run that was told 10,000 and had settled: later changes are left out",
}


def main(arguments=None):
    """Do what the command line asks."""
    options = parse(arguments)
    if options.child:
        from .child import main as child

        child(json.loads(options.child))
        return 0
    try:
        for path in filter(None, (options.table, options.out)):
            files.load(path, must_be_there=path == options.table)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.write_tables is not None:
        return write_tables(options.write_tables or None)
    if options.table:
        found = files.load(options.table)
        files.summarise(found)
        show.tables(found)
        return 0
    return run(options)


def write_tables(result):
    """Write the tables of the pages anew."""
    try:
        changed = tables.write(result)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written: {', '.join(changed)}" if changed else "the pages are as their result files")
    return 0


def parse(arguments):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", default=[], metavar="WORKLOAD[:WAY,...]", help="rows to run")
    parser.add_argument("--part", action="append", default=[], choices=list(plan.PARTS), help="parts to run")
    parser.add_argument("--plan", action="store_true", help="print what would run, and for about how long")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds for this call: what would not fit waits"
    )
    parser.add_argument("--row-limit", type=float, default=570.0, help="seconds for one row (%(default)s)")
    parser.add_argument("--out", type=pathlib.Path, help="the result file; else one in benchmarks/results, of today")
    parser.add_argument("--cpu", action="store_true", help="the subset for a CPU, at small sizes")
    parser.add_argument("--note", help="what else a reader of the file should know, as who shares the machine")
    parser.add_argument("--again", action="store_true", help="run chosen rows again that the file holds already")
    parser.add_argument("--table", type=pathlib.Path, metavar="FILE", help="print the tables of a result file")
    parser.add_argument(
        "--write-tables", nargs="?", const="", metavar="FILE", help="write the tables of README.md and docs anew"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(options):
    """Run the rows that are chosen and not yet measured, or print them."""
    device = "cpu" if options.cpu else "cuda"
    out = options.out or (None if options.plan else files.default_path(device, gpu_name(device)))
    held = files.load(out) if out else {"rows": []}
    rows = plan.cpu() if options.cpu else plan.gpu(held)
    try:
        rows = plan.choose(rows, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for row in rows if not options.part or any(plan.in_part(row, part) for part in options.part)]
    todo = [row for row in rows if options.again or row.key not in files.done(held)]
    if options.plan:
        show.plan(todo, len(rows) - len(todo))
        return 0
    document = files.begin(out, device, SETTINGS)
    if options.note:
        document["settings"]["note"] = options.note
    failed, waiting = run_rows(todo, document, out, options)
    files.save(document, out)
    show.tables(document)
    not_run = f", {waiting} did not run" if waiting else ""
    print(f"{out}: {len(document['rows'])} results; {len(todo)} rows were asked for, {failed} failed{not_run}")
    return 0


def run_rows(todo, document, out, options):
    """Run rows one by one, each result put in the file at once; returns how many failed, and how many did not run."""
    begin, failed, waiting = time.monotonic(), 0, 0
    for place, row in enumerate(todo, 1):
        left = options.limit - (time.monotonic() - begin)
        if row.seconds > left:
            print(f"not begun, {left:.0f} s are left: {row.key} (about {row.seconds} s)")
            waiting += 1
            continue
        why = plan.missing(row.workload)
        results = skipped(row, why, options) if why else measured(row, options, min(left, options.row_limit))
        if left < options.row_limit and LATE in results[-1].get("error", ""):
            print(f"cut off by --limit, to be run again: {row.key}")
            waiting += 1
            continue
        failed += any("error" in result for result in results)
        files.add(document, row.key, results)
        files.save(document, out)
        print(f"[{place}/{len(todo)}] {row.key}: {'; '.join(map(show.in_short, results))}", flush=True)
    return failed, waiting


def skipped(row, why, options):
    """Return the results of a row that cannot run here."""
    size = "cpu" if options.cpu else "gpu"
    same = {"row": row.key, "kind": row.kind, "workload": row.workload, "size": size, "number": row.number}
    return [{**same, "way": way, "skipped": why} for way in row.ways]


def measured(row, options, limit):
    """Run a row in a process and caches of its own; a row that fails or takes too long gives what it had."""
    size, device = ("cpu", "cpu") if options.cpu else ("gpu", "cuda")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = pathlib.Path(folder, "results.json")
        order = {"row": dataclasses.asdict(row), "device": device, "size": size, "out": str(out)}
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "HOTLOOP_CACHE_DIR": "hotloop"}
        env = {**os.environ, **{name: str(pathlib.Path(folder, part)) for name, part in caches.items()}}
        error = ended([sys.executable, "-m", "benchmarks.suite", "--child", json.dumps(order)], env, limit)
        results = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else skipped(row, "", options)
        if error or not out.is_file():
            results[-1] |= {"error": error or "the process ended without a result"}
            results[-1].pop("skipped", None)
    results[0]["process_seconds"] = round(time.monotonic() - begin, 1)
    return results


def ended(command, env, limit):
    """Run a command to its end; return an error, or nothing. Its children end with it."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(limit)
            late = False
        except subprocess.TimeoutExpired:
            status, late = None, True
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if late:
            return f"{LATE} {limit:.0f} s"
        errors.seek(0)
        return errors.read().strip()[-1500:] if status else ""


def gpu_name(device):
    """Name the GPU; without one the GPU's rows cannot run."""
    if device != "cuda":
        return ""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: --cpu runs the subset for a CPU, --plan shows what a GPU would run")
    return torch.cuda.get_device_name()


if __name__ == "__main__":
    sys.exit(main())
