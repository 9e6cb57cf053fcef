"""Runs told 20,000 steps: what the sentinel takes of them, and when which tier was decided on, compiled and in force.

usage: python -m benchmarks.long_runs [bert xlmr resnet18 gpt] [--steps 20000] [--seconds 140] [--out FILE] [--cpu]

Each row is one run of ``auto`` in a process of its own, cut short after ``--seconds``, though it is told all its steps.
The share is what checks have cost of the time of the steps so far; ``of all`` holds it against the time of all steps at
the pace of the last five hundred, which is what the promise is about: a told run may check early.

The time line has seconds from the begin of the first step; a child's are its own: Python and torch imported, the model
built, all compiled. With ``--cpu`` the sizes are small, and captured steps are stood in for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

import hotloop

from .suite import workloads

BLOCKS = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)


class Block(nn.Module):
    """The block of a ResNet-18."""

    def __init__(self, wide, wider, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(wide, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.norm2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.beside = nn.Identity()
        if stride > 1:
            self.beside = nn.Sequential(nn.Conv2d(wide, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x):
        """Add what two convolutions make of the input to it."""
        made = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(made + self.beside(x))


class ResNet18(nn.Module):
    """A ResNet-18 for pictures of 32 px, as CIFAR's."""

    def __init__(self, blocks=BLOCKS):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in blocks))
        self.last = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(blocks[-1][1], 10))

    def forward(self, x):
        """Return a score for each of ten classes."""
        return self.last(self.blocks(self.first(x)))


def resnet18(place):
    """A ResNet-18 on 128 pictures of 32 px."""
    model = place.build(lambda: ResNet18(place.of(gpu=BLOCKS, cpu=BLOCKS[:2])))
    return workloads.pictures(place, model, gpu=(128, 32), cpu=(2, 16), classes=10)


def bert(place):
    """BERT-base as a classifier, with its dropout, on 16 texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**place.of(gpu={}, cpu={**small, "vocab_size": 500}))
    model = place.build(lambda: BertForSequenceClassification(config))
    optimizer, autocast = workloads.adamw(model.parameters()), place.autocast()

    def train_step(input_ids, labels):
        with autocast():
            loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    number, length = place.of(gpu=(16, 128), cpu=(2, 8))
    batches = [
        (place.whole(5, config.vocab_size, number, length), place.whole(0, 2, number)) for _ in range(workloads.BATCHES)
    ]
    return workloads.Program(model, optimizer, train_step, batches)


ROWS = {"bert": bert, "xlmr": workloads.xlmr, "resnet18": resnet18, "gpt": workloads.gpt}


CHILD = ("begun_seconds", "built_seconds", "compile_seconds")


class TimeLine:
    """What happens in a run, with the step and the seconds since its begin."""

    def __init__(self, loop):
        self.loop, self.began, self.entries = loop, time.perf_counter(), []
        self._decisions, self._tier, self._compiles_for = 0, loop.tier.name, None
        self._declined = set()

    def add(self, what):
        """Add an entry for what happens now."""
        self.entries.append((round(time.perf_counter() - self.began, 2), self.loop.steps, what))

    def look(self):
        """Note what is new; called after each step."""
        decided = self.loop.account.decisions
        for line in decided[self._decisions :]:
            self.add(line)
            if "compiled in the background" in line:
                entry = next(one for one in self.loop.record.document["decisions"] if one["reason"] == line)
                self.add(", ".join(f"{part} {entry[part]:.1f}" for part in CHILD))
        self._decisions = len(decided)
        for name, account in self.loop.account.tiers.items():
            if account.declined and name not in self._declined:
                self._declined.add(name)
                self.add(f"{name} is declined: {account.declined}")
        background = self.loop.policy.background
        if background.tier != self._compiles_for:
            self.add(f"a child began to compile {background.tier}" if background.tier else "the child is gone")
            self._compiles_for = background.tier
        if self.loop.policy.in_force.name != self._tier:
            self._tier = self.loop.policy.in_force.name
            self.add(f"{self._tier} is in force")
        if self.loop.last_ran()[1] == "sentinel":
            self.add(f"a step in {self._tier} was checked")


def row(name, asked):
    """Run one row in this process; return its figures."""
    device = torch.device("cpu" if asked.cpu else "cuda")
    program = ROWS[name](workloads.Place(device, "cpu" if asked.cpu else "gpu"))
    waited = (lambda: None) if asked.cpu else torch.cuda.synchronize
    with hotloop.testing.captured_step_emulation() if asked.cpu else contextlib.nullcontext():
        loop = hotloop.Loop(program.model, program.optimizer, run="auto", total_steps=asked.steps)
        step = loop.step(program.step)
        line, done, marks = TimeLine(loop), 0, []
        while done < asked.steps and time.perf_counter() - line.began < asked.seconds:
            step(*program.batch(done))
            line.look()
            done += 1
            if done % 100 == 0:
                waited()
                marks.append(time.perf_counter() - line.began)
        waited()
        seconds = time.perf_counter() - line.began
        status = loop.status()
        loop.close()
    checks = [one for one in status.sentinels if one.checks]
    cost = sum(one.seconds for one in checks)
    paces = [(after - before) / 100 for before, after in itertools.pairwise(marks)]
    lately = statistics.median(paces[-5:])
    return {
        "row": name,
        "told": asked.steps,
        "steps": done,
        "seconds": round(seconds, 1),
        "median_ms": round(1e3 * statistics.median(paces), 3),
        "last_ms": round(1e3 * lately, 3),
        "sentinel_seconds": round(cost, 2),
        "share": round(cost / seconds, 4),
        "share_of_all": round(cost / (seconds + (asked.steps - done) * lately), 4),
        "checks": sum(one.checks for one in checks),
        "suspicions": sum(one.suspicions for one in checks),
        "sentinels": [str(one) for one in checks],
        "tier": status.tier,
        "declined": {one.name: one.why for one in status.tiers if one.state == "declined"},
        "peak_bytes": None if asked.cpu else torch.cuda.max_memory_allocated(),
        "torch": torch.__version__,
        "device": "cpu" if asked.cpu else torch.cuda.get_device_name(),
        "time_line": line.entries,
    }


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_runs", description=__doc__.partition("\n")[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="row", help=f"of {', '.join(ROWS)}")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("ROW " + json.dumps(row(asked.child, asked)), flush=True)
        return
    found = []
    for name in asked.rows:
        options = ["--steps", str(asked.steps), "--seconds", str(asked.seconds), *(["--cpu"] if asked.cpu else [])]
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.long_runs", "--child", name, *options],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        told = [line.removeprefix("ROW ") for line in ran.stdout.splitlines() if line.startswith("ROW ")]
        found.append(json.loads(told[0]) if told else {"row": name, "error": f"it ended with {ran.returncode}"})
        show(found[-1])
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def show(made):
    """Print a row, and its time line."""
    if "error" in made:
        print(f"{made['row']}: {made['error']}", flush=True)
        return
    print(f"{made['row']}: {made['steps']:,} of {made['told']:,} steps in {made['seconds']} s")
    print(f"  {made['tier']}, {made['last_ms']} ms a step")
    print(
        f"  sentinel {made['sentinel_seconds']} s: {made['share']:.2%} so far, {made['share_of_all']:.2%} of all",
        flush=True,
    )
    for seconds, step, what in made["time_line"]:
        print(f"  {seconds:8.2f} s  step {step:6,}  {what}", flush=True)


if __name__ == "__main__":
    main()
