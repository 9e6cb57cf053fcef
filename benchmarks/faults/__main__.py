"""Plant every fault in every way to train, and write the table of docs/evidence/faults.md.

usage: python -m benchmarks.faults [--python INTERPRETER] [--ways loop train] [--only lowering ...]
           [--out benchmarks/results/DATE-cpu-faults-torch-2.11.json]
       python -m benchmarks.faults --write docs/evidence/faults.md RESULT RESULT

A cell is a process of its own (or several, for a resume), judged by its exit code, what it printed, and its losses.
Rows that are in the file already are replaced by those that ran. Small disks and folders of other users need root.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import pathlib
import sys
import tempfile
import time

from benchmarks.faults import compiling, runs
from benchmarks.faults.running import WAYS, Bench, NotHereError, Run, play

PARTS = {"compiling": compiling.FAULTS, "runs": runs.FAULTS}
FAULTS = {fault.name: fault for faults in PARTS.values() for fault in faults}


def cell(fault, way, bench):
    """Run one cell; return its row of the document."""
    part = next(part for part, faults in PARTS.items() if fault in faults)
    row = {"fault": fault.name, "part": part, "title": fault.title, "way": way, "preset": fault.preset}
    if way not in fault.ways:
        return {**row, "not_here": fault.elsewhere}
    began = time.monotonic()
    run = Run(fault, way, bench)
    try:
        found = play(run)
    except NotHereError as error:
        return {**row, "not_here": str(error)}
    if not found.right:
        print(run.output[-6000:], file=sys.stderr, flush=True)
    return {**row, **dataclasses.asdict(found), "right": found.right, "seconds": round(time.monotonic() - began, 1)}


def keep(rows, path, bench, command):
    """Write the rows into the document; rows of other cells stay."""
    versions = bench.versions
    ran = {(row["fault"], row["way"]) for row in rows}
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    order = list(FAULTS)
    rows = [row for row in kept if (row["fault"], row["way"]) not in ran and row["fault"] in FAULTS] + rows
    rows.sort(key=lambda row: (order.index(row["fault"]), WAYS.index(row["way"])))
    document = {
        "what": "faults planted in each way to train, and what came of it",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "command": command,
        "versions": versions,
        "rows": rows,
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main():
    """Run the cells that were asked for, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter whose torch is tried")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--only", nargs="+", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--write", type=pathlib.Path, help="the page to write, of the results named")
    parser.add_argument("results", nargs="*", type=pathlib.Path)
    given = parser.parse_args()
    if given.write:
        from benchmarks.faults import page

        page.write(given.write, given.results)
        return 0
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="hotloop-faults-") as folder:
        bench = Bench(given.python, pathlib.Path(folder))
        for name in given.only:
            for way in given.ways:
                row = cell(FAULTS[name], way, bench)
                wrong += not row.get("right", True)
                print(json.dumps(row), flush=True)
                if given.out:
                    keep([row], given.out, bench, "python -m benchmarks.faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
