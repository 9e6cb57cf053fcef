"""A search of 20 trials, final training and five folds: eager, torch.compile in every trial, hotloop's true and auto.

usage: python benchmarks/search_gpu.py [--parts search final folds] [--trials 20] [--steps 200] [--limit SECONDS]
       [--out benchmarks/results/DATE-h200-search.json] [--small]

XLM-R base from a config with a classification head, 8 x 512 random tokens, bfloat16 autocast, fused AdamW, linear
warm-up and decay; trials differ in learning rate, weight decay and warm-up. Ways go by turns in one process, trial by
trial, and each has a folder of its own for compiled code, so that none finds what another compiled. What is timed of
a trial: ``build_seconds`` the model and its optimizer; ``seconds`` all else, from the first step's preparation to the
last step's end on the device and the loop's closing. ``overhead_seconds`` is what a trial took beyond its steps at
their steady pace (the median of the last half). A child that compiles for ``auto`` in the background is stopped while
the other ways run.

``final`` and ``folds`` give the seconds of each epoch; the total for 100 epochs is computed: the epochs that were run,
and the last one's time for those that were not. ``auto`` is told of the 100.

The document is written after every trial. A run that is broken off, or whose ``--limit`` is over, goes on with what is
left when it is started again; rows say which start they come from, since a new process knows nothing of the old one.
``--small`` runs a tiny model on the CPU, to see that all of this works.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import itertools
import json
import math
import os
import pathlib
import signal
import statistics
import tempfile
import time

import torch
from ledger import processor

import hotloop
from hotloop import events as ev
from hotloop.step.policy import process_history

WAYS = {"search": ("eager", "compile", "auto"), "final": ("eager", "true", "auto"), "folds": ("eager", "true", "auto")}
RATES, DECAYS, WARM_UPS = (5e-6, 1e-5, 2e-5, 3e-5), (0.0, 0.01, 0.1), (0.0, 0.06, 0.1)
EPOCHS = 100


def settings_of(number):
    """Return learning rate, weight decay and warm-up of a trial."""
    return RATES[number % 4], DECAYS[number % 3], WARM_UPS[(number // 3) % 3]


class Program:
    """A model with its optimizer and schedule, made anew for each trial, and its step."""

    def __init__(self, options, number, steps):
        from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

        self.options, self.device = options, options.device
        sizes = {"vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1}
        if options.small:
            sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "intermediate_size": 64, "max_position_embeddings": 64, "type_vocab_size": 1}  # fmt: skip
        torch.manual_seed(number)
        config = XLMRobertaConfig(num_labels=1, pad_token_id=1, bos_token_id=0, eos_token_id=2, **sizes)
        with torch.device(self.device):  # random weights are drawn there: twenty models a way are quick to make
            self.model = XLMRobertaForSequenceClassification(config).train()
        rate, decay, warm_up = settings_of(number)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=decay, fused=True)
        first = math.ceil(warm_up * steps)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda at: (at + 1) / first if at < first else max(0.0, (steps - at) / max(1, steps - first)),
        )

    def step(self, ids, labels):
        """Do one optimizer step."""
        with torch.autocast(self.device, torch.bfloat16):
            logits = self.model(input_ids=ids).logits.squeeze(-1)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def batches(self, count):
        """Return random batches, drawn before the clock starts."""
        draws = torch.Generator().manual_seed(1)
        rows, tokens, words = (4, 16, 100) if self.options.small else (8, 512, 250_002)
        made = [
            (torch.randint(5, words, (rows, tokens), generator=draws), torch.randint(0, 2, (rows,), generator=draws))
            for _ in range(min(count, 32))
        ]
        return [(ids.to(self.device), labels.float().to(self.device)) for ids, labels in made]


def synchronize(options):
    if options.device == "cuda":
        torch.cuda.synchronize()


@contextlib.contextmanager
def alone(way):
    """Stop the background compiles of auto while another way runs; ignore a child that has ended meanwhile."""
    stopped = [] if way == "auto" else [child.pid for child in process_history.children() if child.poll() == "running"]
    for pid in stopped:
        os.killpg(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.killpg(pid, signal.SIGCONT)


@contextlib.contextmanager
def folder_of(way, options):
    """Keep compiled code in a folder of the way's own."""
    place = pathlib.Path(options.scratch, way)
    place.mkdir(exist_ok=True)
    names = ("TORCHINDUCTOR_CACHE_DIR", "HOTLOOP_CACHE_DIR")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(place), HOTLOOP_CACHE_DIR=str(place / "hotloop"))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def runner(program, way, told, runs, stack):
    """Return the function that runs a step in a way, and the loop that owns the step, if any."""
    if way == "compile":
        program.model.compile()
    elif way == "true":
        hotloop.compile(program.model)
    elif way == "auto":
        loop = stack.enter_context(
            hotloop.Loop(program.model, program.optimizer, run="auto", total_steps=told, runs=runs)
        )
        return loop.step(program.step), loop
    return program.step, None


def run(way, number, options, *, steps, told, runs, epochs=1):  # noqa: PLR0913 - what a call of the plan says
    """Run a trial or fold in one way; return its seconds."""
    began = time.perf_counter()
    program = Program(options, number, told)
    batches = program.batches(steps)
    synchronize(options)
    built, marks, marked = time.perf_counter() - began, [], []
    status = None
    with hotloop.watch() as events, folder_of(way, options), alone(way), contextlib.ExitStack() as stack:
        start = time.perf_counter()
        step, loop = runner(program, way, told, runs, stack)
        for _ in range(epochs):
            for index in range(steps):
                loss = step(*batches[index % len(batches)])
                program.schedule.step()
                if index % 10 == 9 or index == steps - 1:
                    synchronize(options)
                    marks.append(((index % 10) + 1, time.perf_counter()))
            synchronize(options)
            marked.append(time.perf_counter())
        if loop is not None:
            status = loop.status()
    total = time.perf_counter() - start
    paces = [(now - before) / count for (_, before), (count, now) in itertools.pairwise(marks)]
    pace = statistics.median(paces[len(paces) // 2 :] or [total / steps])
    row = {
        "way": way,
        "number": number,
        "start": options.start,
        "build_seconds": round(built, 3),
        "seconds": round(total, 4),
        "epoch_seconds": [round(b - a, 4) for a, b in zip([start, *marked], marked, strict=False)],
        "steady_ms": round(1e3 * pace, 3),
        "overhead_seconds": round(total - pace * steps * epochs, 4),
        "compiles": sum(isinstance(event, ev.Compiled) for event in events),
        "loss": round(loss.item(), 5),
        "child": any(child.poll() == "running" for child in process_history.children()),
    }
    if status is not None:
        decisions = list(status.decisions)
        row |= {"tier": status.tier, "prepare_seconds": round(status.prepare_seconds, 3), "decisions": decisions}
    del program, batches, step, loop
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def plan(part, options):
    """List what a part runs: way, number and how it is called."""
    if part == "search":
        calls = [
            {"steps": options.steps, "told": options.steps, "runs": options.trials - n} for n in range(options.trials)
        ]
    elif part == "final":
        calls = [{"steps": options.steps, "told": options.steps * EPOCHS, "runs": None, "epochs": options.epochs}]
    else:
        told = options.steps * EPOCHS
        calls = [{"steps": options.steps, "told": told, "runs": 5 - n, "epochs": options.epochs} for n in range(5)]
    ways = WAYS[part]
    for number, call in enumerate(calls):
        turn = number % len(ways)
        for way in (*ways[turn:], *ways[:turn]):
            yield way, number, call


def summary(rows):
    """Summarise each part by way."""
    found = {}
    for part, ways in WAYS.items():
        mine = {way: [row for row in rows if row["part"] == part and row["way"] == way] for way in ways}
        if not all(mine.values()):
            continue
        found[part] = {way: _sum(part, some) for way, some in mine.items()}
        if part == "search":
            numbers = sorted(set.intersection(*({row["number"] for row in some} for some in mine.values())))
            took = {(row["way"], row["number"]): row["seconds"] for some in mine.values() for row in some}
            rivals = [(min(took[way, n] for way in ("eager", "compile")), took["auto", n]) for n in numbers[1:]]
            found[part]["auto_over_eager"] = found[part]["eager"]["seconds"] / found[part]["auto"]["seconds"]
            found[part]["auto_over_compile"] = found[part]["compile"]["seconds"] / found[part]["auto"]["seconds"]
            found[part]["trials_after_the_first"] = len(rivals)
            found[part]["of_them_ahead_of_both"] = sum(ours < best for best, ours in rivals)
    return found


def _sum(part, rows):
    total = {"runs": len(rows), "seconds": round(sum(row["seconds"] for row in rows), 3)}
    total |= {"build_seconds": round(sum(row["build_seconds"] for row in rows), 2)}
    total |= {
        "overhead_seconds": [row["overhead_seconds"] for row in rows],
        "compiles": [row["compiles"] for row in rows],
    }
    if part != "search":
        epochs = [row["epoch_seconds"] for row in rows]
        total["first_epoch_seconds"] = [one[0] for one in epochs]
        total["last_epoch_seconds"] = [one[-1] for one in epochs]
        total["computed_100_epochs_seconds"] = round(sum(sum(one) + (EPOCHS - len(one)) * one[-1] for one in epochs), 1)
    return total


def main():
    """Run the rest of the plan, and write the document after each entry."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["search", "final", "folds"], choices=list(WAYS))
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4, help="that final and folds run of the 100")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing more is begun")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=pathlib.Path)
    options = parser.parse_args()
    options.device = "cpu" if options.small or not torch.cuda.is_available() else "cuda"
    began = time.monotonic()
    kept = (
        json.loads(options.out.read_text("utf-8"))
        if options.out and options.out.exists()
        else {"starts": 0, "rows": []}
    )
    rows, options.start = kept["rows"], kept["starts"] + 1
    done = {(row["part"], row["way"], row["number"]) for row in rows}
    with tempfile.TemporaryDirectory() as options.scratch:
        run("eager", 0, options, steps=3, told=3, runs=None)  # what libraries set up once
        for part in options.parts:
            for way, number, call in plan(part, options):
                if (part, way, number) in done or time.monotonic() - began > options.limit:
                    continue
                row = {"part": part, **run(way, number, options, **call)}
                rows.append(row)
                print(json.dumps({key: value for key, value in row.items() if key != "decisions"}), flush=True)
                write(rows, options)
    process_history.forget()
    print(json.dumps(summary(rows), indent=1))


def write(rows, options):
    """Write the document."""
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/search_gpu.py" + (" --small" if options.small else ""),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
        "torch": torch.__version__,
        "settings": {"trials": options.trials, "steps": options.steps, "epochs": options.epochs},
        "starts": options.start,
        "summary": summary(rows),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
