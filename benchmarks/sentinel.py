"""Long runs under the sentinel: its false alarms on correct code, and its cost.

usage: python benchmarks/sentinel.py [--device cpu] [--steps 10000] [--every 10] [--models mlp convolutions gpt]
       [--mode bfloat16] [--preset inductor] [--out benchmarks/results/DATE-DEVICE-sentinel.json]

Small models are trained with compiled code that is right. A check is forced every so many steps, far more often than 1%
of the time would allow, since each one is a chance to be wrong: the number of alarms has to be 0. Batches are drawn
anew at every step, and the models learn them, so that late gradients are small beside their rounding. Then the same run
with the sentinel's own setting, to see its period and its cost. What it costs of 20,000 steps of BERT, XLM-R, ResNet-18
and GPT on a GPU is measured by `benchmarks/long_runs.py`.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import pathlib
import time
from unittest import mock

import torch
from ledger import processor
from noise import MODELS

import hotloop
from hotloop.step.prove import sentinel

ROOT = pathlib.Path(__file__).parents[1]


def forced(every):
    """Return a plan that checks at this period, whatever the cost."""

    def plan(self, seconds, _tier, work):
        self._budget.note(work, seconds)
        self._left = self._every = every

    return plan


def train(kind, options):
    """Train a model under the sentinel; return its checks and alarms, and the time that they took."""
    torch.compiler.reset()
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    model = kind().to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(options.mode)
    loop = hotloop.Loop(model, optimizer, run=options.preset)

    @loop.step
    def step(x, y):
        with torch.autocast(options.device, amp or torch.bfloat16, enabled=amp is not None):
            loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses, alarms, began = [], 0, time.perf_counter()
    with hotloop.watch() as events:
        for number in range(options.steps):
            x, y = (one.to(options.device) for one in kind.batch(draws))
            loss = step(x, y)
            if number % max(1, options.steps // 20) == 0:
                losses.append(round(float(loss.detach()), 5))
        alarms = sum(isinstance(one, hotloop.events.SentinelDisagreed) for one in events)
    seconds = time.perf_counter() - began
    found = loop.status()
    told = found.sentinels[0] if found.sentinels else None
    loop.close()
    return {
        "steps": options.steps,
        "seconds": round(seconds, 1),
        "losses": losses,
        "alarms": alarms,
        "checks": told.checks if told else 0,
        "suspicions": told.suspicions if told else 0,
        "every": told.every if told else None,
        "sentinel_seconds": round(told.seconds, 2) if told else 0.0,
        "share_measured": round(told.seconds / seconds, 4) if told else 0.0,
        "tier": found.tier,
        "said": told.disagreed if told else "",
    }


def main():
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--models", nargs="+", default=["mlp", "convolutions", "gpt"], choices=MODELS)
    parser.add_argument("--mode", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--preset", default="inductor")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    for name in options.models:
        row = {"model": name, "mode": options.mode}
        with (
            mock.patch.object(sentinel.Sentinel, "_plan", forced(options.every)),
            mock.patch.object(sentinel.Sentinel, "_may_begin", return_value=True),
        ):
            row["forced"] = train(MODELS[name], options)
        print(json.dumps(row), flush=True)
        row["usual"] = train(MODELS[name], options)
        print(json.dumps(row["usual"]), flush=True)
        rows.append(row)
        if options.out:
            write(rows, options)


def write(rows, options):
    """Write the document; rows of other models that are in it already stay."""
    kept = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    here = {(row["model"], row["mode"]) for row in rows}
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/sentinel.py",
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "preset": options.preset,
        "rows": [row for row in kept if (row["model"], row["mode"]) not in here] + rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
