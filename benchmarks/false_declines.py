"""How often a proof declines a right program: 200 small programs, five seeds each.

usage: python benchmarks/false_declines.py [--runs eager+graph aot_eager] [--structures gan ...] [--seeds 5]
       [--out benchmarks/results/DATE-cpu-false-declines.json]

The programs are those of ``small_programs.py``. All of them can be captured, and nothing is wrong with them: each tier
that is declined is a false decline, and its cause is written down. What torch does not compile, by its own words (LSTM
and GRU; double backward), is counted apart. ``eager+graph`` runs on the stand-in for a captured step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import logging
import pathlib

import torch
from ledger import processor
from small_networks import Program
from small_programs import STRUCTURES, programs

import hotloop
from hotloop import events as ev
from hotloop.testing import captured_step_emulation

STEPS = 12
_TORCH_CANNOT = ("does not support RNN, GRU, or LSTM", "does not support double backward")


def train(parts, seed, asked):
    """Train one program with a tier; return the cause where it was declined, else an empty text."""
    structure, *of = parts
    torch.compiler.reset()
    program = Program(*of, seed)
    model, optimizer, step, batch = STRUCTURES[structure](program)
    stand_in = captured_step_emulation() if asked.endswith("+graph") else contextlib.nullcontext()
    with stand_in, hotloop.watch() as events, hotloop.Loop(model, optimizer, run=asked) as loop:
        run = loop.step(step)
        for _ in range(2 * STEPS if structure == "accumulated" else STEPS):
            run(*batch())
        state = {tier.name: tier for tier in loop.status().tiers}.get(asked)
    left = [one for one in events if isinstance(one, ev.TierDeclined)]
    if left:
        return left[0].reason
    return "" if state is not None and state.state == "in force" and not state.why else f"not in force: {state}"


def campaign(asked, structure, seeds):
    """Train the ten programs of a structure with a tier; return a row of the document."""
    chosen = {name: parts for name, parts in programs().items() if parts[0] == structure}
    row = {"run": asked, "structure": structure, "programs": len(chosen), "seeds": seeds, "not_compiled_by_torch": 0}
    row["declined"] = []
    for name, parts in chosen.items():
        for seed in range(seeds):
            why = train(parts, seed, asked)
            if any(words in why for words in _TORCH_CANNOT):
                row["not_compiled_by_torch"] += 1
            elif why:
                row["declined"].append({"program": name, "seed": seed, "why": why})
    return row


def write(row, path):
    """Write a row into the document; the other rows that are in it already stay."""
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = [*(one for one in kept if (one["run"], one["structure"]) != (row["run"], row["structure"])), row]
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/false_declines.py",
        "machine": processor(),
        "torch": torch.__version__,
        "threads": 1,
        "steps": STEPS,
        "totals": {
            run: {
                "runs": sum(one["programs"] * one["seeds"] for one in rows if one["run"] == run),
                "not_compiled_by_torch": sum(one["not_compiled_by_torch"] for one in rows if one["run"] == run),
                "declined": sum(len(one["declined"]) for one in rows if one["run"] == run),
            }
            for run in sorted({one["run"] for one in rows})
        },
        "rows": sorted(rows, key=lambda one: (one["run"], list(STRUCTURES).index(one["structure"]))),
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main():
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=["eager+graph", "aot_eager"])
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=STRUCTURES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    logging.getLogger("hotloop").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for asked in options.runs:
        for structure in options.structures:
            row = campaign(asked, structure, options.seeds)
            print(json.dumps(row), flush=True)
            if options.out:
                write(row, options.out)


if __name__ == "__main__":
    main()
