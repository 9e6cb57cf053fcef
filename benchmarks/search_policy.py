"""Twenty trials of the recipe criteria in one process: compiles, silently eager trials (none), the cost of auto.

usage: python benchmarks/search_policy.py [--trials 20] [--steps 60] [--ways false auto true] [--preset aot_eager]
       [--encoder small] [--out benchmarks/results/DATE-cpu-search-policy.json]

Learning rate, dropout and batch size vary from trial to trial. Each trial is run in every way before the next one, the
ways by turns, in one process, as `hotloop hpo` runs its trials (`Start.within` says how many are left). The seconds are
those of `fit`: steps, preparation, validation and checkpoints, without the loading of data and model.
"""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import io
import itertools
import json
import pathlib
import tempfile

import torch
from ledger import processor
from rich.console import Console

import hotloop
from hotloop import events as ev
from hotloop import recipes
from hotloop.recipes.criteria import encoder
from hotloop.step.policy import process_history
from hotloop.train import start
from hotloop.train.within import Within

RATES = (5e-5, 1e-4, 2e-4, 3e-4)
DROPOUTS = (0.0, 0.1, 0.2, 0.3)
SIZES = (4, 8, 16)


def space(trials):
    """Return the settings of each trial: every pair of dropout and batch size comes, and comes again."""
    pairs = list(itertools.product(DROPOUTS, SIZES))
    return [(RATES[number % len(RATES)], *pairs[number % len(pairs)]) for number in range(trials)]


def small_encoder(folder):
    """A BERT of two layers with MiniLM's tokenizer, saved."""
    from transformers import BertConfig, BertForSequenceClassification

    encoder.load("minilm-l6").tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, num_labels=1)
    BertForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


def trial(way, values, folder, left, options):
    """Run a trial in one way; return its seconds and its compiles."""
    rate, dropout, size = values
    overrides = [
        f"model.name={options.encoder}",
        f"model.dropout={dropout}",
        "model.max_length=32",
        f"data.sample_size={options.sample}",
        f"training.learning_rate={rate}",
        f"training.batch_size={size}",
        "training.num_epochs=50",
        f"training.max_steps={options.steps}",
        "training.early_stopping_patience=null",
        f"training.optimization.use_torch_compile={way}",
        "compile.measure_eager_steps=0",
        "run.device=cpu",
        f"run.folder={folder}",
    ]
    if way == "true":
        overrides.append(f"compile.preset={options.preset}")
    begun = start.prepare(overrides)
    begun = start.Start(begun.settings, begun.folder, begun.resume, Within(runs=left))
    with hotloop.watch() as events:
        outcome = recipes.load("criteria").train(begun, Console(file=io.StringIO()))
    model = outcome.components["model"]
    return {
        "way": way,
        "learning_rate": rate,
        "dropout": dropout,
        "batch_size": size,
        "seconds": round(outcome.seconds, 3),
        "compiles": sum(isinstance(event, ev.Compiled) for event in events),
        "fallbacks": sum(isinstance(event, ev.Fallback | ev.FrameEager) for event in events),
        "asked": model["requested"],
        "running": model["running"],
        "state": model["state"],
        "steps": outcome.step,
        "compiled_steps": model.get("frames_compiled", 0),
        "f1": outcome.best.get("f1"),
        "notes": list(outcome.notes),
    }


def summary(rows, options):
    """Summarise by way, and compare the figures with the goals."""
    found = {}
    for way in options.ways:
        mine = [row for row in rows if row["way"] == way]
        compiles = collections.Counter()
        for row in mine:
            compiles[f"{row['batch_size']} x {row['dropout']}"] += row["compiles"]
        found[way] = {
            "trials": len(mine),
            "seconds": round(sum(row["seconds"] for row in mine), 2),
            "compiles": sum(compiles.values()),
            "kinds": len(compiles),
            "most_compiles_of_a_kind": max(compiles.values(), default=0),
            "steps": sum(row["steps"] for row in mine),
            "compiled_steps": sum(row["compiled_steps"] for row in mine),
            "fallbacks": sum(row["fallbacks"] for row in mine),
        }
    if {"false", "auto"} <= set(options.ways):
        eager, auto = found["false"]["seconds"], found["auto"]["seconds"]
        found["auto"]["allowed_seconds"] = round(1.02 * eager + 1.0, 2)
        found["auto"]["over_eager"] = round(auto / eager, 4)
    return found


def main():
    """Run the trials, and write the document after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--ways", nargs="+", default=["false", "auto", "true"], choices=["false", "auto", "true"])
    parser.add_argument("--preset", default="aot_eager")
    parser.add_argument("--encoder", default="small", help="small, minilm-l6, a folder or a hub name")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    named, rows = options.encoder, []
    with tempfile.TemporaryDirectory() as scratch:
        if named == "small":
            options.encoder = small_encoder(pathlib.Path(scratch, "encoder"))
        process_history.forget()
        trial("false", space(1)[0], pathlib.Path(scratch, "warm-up"), 1, options)  # what libraries set up once
        for number, values in enumerate(space(options.trials)):
            turn = number % len(options.ways)
            for way in (*options.ways[turn:], *options.ways[:turn]):
                folder = pathlib.Path(scratch, f"{number}-{way}")
                row = trial(way, values, folder, options.trials - number, options)
                rows.append({"trial": number, **row})
                print(json.dumps({key: row[key] for key in row if key != "notes"}), flush=True)
            document = {
                "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
                "command": "python benchmarks/search_policy.py",
                "machine": processor(),
                "torch": torch.__version__,
                "threads": torch.get_num_threads(),
                "encoder": "BERT 2 layers of 64, MiniLM's tokenizer" if named == "small" else named,
                "settings": {"steps": options.steps, "pairs": options.sample, "tokens": 32, "preset": options.preset},
                "summary": summary(rows, options),
                "rows": rows,
            }
            if options.out:
                options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary(rows, options), indent=1))


if __name__ == "__main__":
    main()
