"""Training a latent-diffusion model: each preset on the UNet, all three networks, and auto, each beside eager.

usage: python benchmarks/diffusion.py RESULTS.json [--size small|sd15] [--device cpu|cuda] [--rows "default:unet" ...]
       [--pairs N] [--limit SECONDS]

The step is the recipe's: noise, the UNet's prediction, the Min-SNR loss, backward, clipping, AdamW (fused on a GPU).
With ``small`` it is the embedded default's UNet, 64 latents of 4 x 4 x 4; with ``sd15`` networks of Stable Diffusion
1.5's sizes, 8 latents of 4 x 64 x 64 (pictures of 512 x 512), under bfloat16 autocast. A row is ``PRESET:WHAT``. WHAT
is ``unet`` (latents and embeddings are cached, as by default), ``all`` (UNet, text encoder, VAE compiled, both
encoders in each step; held against an eager step that does the same) or ``lora`` (adapters of rank 16). PRESET is one
of hotloop's, or ``auto told N``, a hot loop that is told of a run of N steps.

Each row has a process and a compile cache of its own. A preset and eager alternate there in blocks of steps (AB, BA,
...): ``ratio`` is the median of eager's time by the preset's, block beside block, with its 95% interval. ``cold_s`` is
from the compile to the end of the third step, less three eager steps. ``totals`` are seconds for a whole run, computed
from these two, ``eager_totals`` beside them. ``auto told N`` runs until nothing is prepared or tried any more, or to
its last step, and is then timed beside eager as a preset is; its total has these steps as they went. Rows in
RESULTS.json already are kept, so that it can be made in parts.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from ledger import processor

import hotloop
from hotloop.measure import interval, ratio_interval
from hotloop.prove.bench.way import in_turns
from hotloop.recipes.diffusion import loading, lora, tokens
from hotloop.recipes.diffusion.denoiser import Denoiser, mean_square
from hotloop.recipes.diffusion.noise import Noise

STEPS = (200, 1_000, 10_000)
AUTO = tuple(f"auto told {steps}" for steps in STEPS)
PRESETS = ("default", "inductor", "triton", "reduce-overhead", "aot_eager")
ROWS = {
    "small": tuple(f"{one}:unet" for one in ("default", "inductor", "aot_eager", *AUTO)),
    "sd15": (
        *(f"{one}:unet" for one in (*PRESETS, *AUTO)),
        "default:all",
        *(f"{one}:lora" for one in ("default", *AUTO)),
    ),
}
BLOCK_SECONDS = 1.0
AUTO_STEPS = 10
"""Steps of an auto run between two looks at the clock."""
QUIET = 40
"""Steps in which nothing is prepared or tried, after which an auto run has settled."""


class Program:
    """A denoiser with random weights, a batch, and its training step."""

    def __init__(self, size, what, device):
        torch.manual_seed(0)
        self.device, self.what, big = device, what, size == "sd15"
        captions = [f"a handwritten {word}" for word in ("zero", "one", "two", "three", "four", "five", "six", "seven")]
        with torch.device(device):
            shape = (3, 512) if big else (1, 16)
            found = loading.load(size, lambda: tokens.learn(captions), shape, 64, print)
        for one in found.modules().values():
            one.eval().requires_grad_(requires_grad=False)
        found.unet.requires_grad_(requires_grad=what != "lora")
        if what == "lora":
            lora.add(found, 16, 16, ("unet",))
        noise = Noise(found.scheduler, "epsilon", 5.0)
        self.denoiser = Denoiser(found, noise, embedded=what != "all", caption_dropout=0.1).to(device)
        rows, side = (8, 64) if big else (64, 4)
        ids = {name: one.to(device) for name, one in found.token_ids((captions * 8)[:rows]).items()}
        mean = torch.randn(rows, 4, side, side, device=device)
        if what == "all":
            pixels = torch.rand(rows, 3 if big else 1, side * found.factor, side * found.factor, device=device)
            self.batch = {"pixels": pixels, **ids}
        else:
            self.batch = {"mean": mean, "logvar": mean - 10, **self.denoiser.embed(ids)}
        self.trained = [one for one in self.denoiser.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, fused=device == "cuda")
        self.precise = torch.autocast(device, torch.bfloat16, enabled=big)

    def step(self, batch):
        """Do one optimizer step."""
        with self.precise:
            loss = mean_square(self.denoiser(**batch), None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def timed(self, steps, run=None):
        """Return the seconds of so many steps, the device's work included."""
        begin = time.perf_counter()
        for _ in range(steps):
            (run or self.step)(self.batch)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def compile(self, preset):
        """Compile what the row says."""
        names = ("unet", "text_encoder", "vae") if self.what == "all" else ("unet",)
        hotloop.compile(self.denoiser.parts(), dict.fromkeys(names, preset))


def beside_eager(size, preset, what, device, pairs):
    """Compile one program, and time it beside an eager one."""
    eager, ours = Program(size, what, device), Program(size, what, device)
    eager.timed(3)
    usual = eager.timed(3)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    ours.compile(preset)
    ours.timed(3)
    cold = time.perf_counter() - begin - usual
    ours.timed(3)
    status = hotloop.status(ours.denoiser.parts())
    found = {
        "cold_s": cold,
        "components": {name: f"{one.running} ({one.state})" for name, one in status.components.items()},
        "graph_breaks": sum(one.graph_breaks for one in status.components.values()),
        **by_turns(ours.timed, eager.timed, pairs),
    }
    # By the ratio, since a machine that slows down for a while moves two medians apart.
    found["totals"] = {str(n): cold + n * found["eager_ms"] / found["ratio"] / 1e3 for n in STEPS}
    found["eager_totals"] = {str(n): n * found["eager_ms"] / 1e3 for n in STEPS}
    return found | peak(device)


def by_turns(ours, eager, pairs):
    """Time two functions that run so many steps and return their seconds; return ms a step, and their ratio."""
    blocks, timed = [[], []], (ours, eager)
    counts = [max(2, round(BLOCK_SECONDS / (one(2) / 2))) for one in timed]
    for order in in_turns(2, pairs):
        for place in order:
            blocks[place].append(1e3 * timed[place](counts[place]) / counts[place])
    ms, eager_ms = (statistics.median(one) for one in blocks)
    return {
        "ms": ms,
        "ms_interval": interval(blocks[0]),
        "eager_ms": eager_ms,
        "ratio": statistics.median(b / a for a, b in zip(*blocks, strict=True)),
        "ratio_interval": ratio_interval(blocks[1], blocks[0]),
        "blocks": blocks,
    }


def peak(device):
    """Return the peak memory of both programs."""
    return {"peak_mb": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None}


def auto(size, total, what, device, pairs):
    """Run a hot loop until it has settled, and time it beside an eager program."""
    program, eager = Program(size, what, device), Program(size, what, device)
    eager.timed(6)
    loop = hotloop.Loop(program.denoiser.unet, program.optimizer, state=program.denoiser, total_steps=total)
    with loop:
        run = loop.step(program.step)
        spent, done, quiet = 0.0, 0, 0
        while done < total and quiet < QUIET:
            steps = min(AUTO_STEPS, total - done)
            spent, done = spent + program.timed(steps, run), done + steps
            quiet = 0 if loop.policy.busy else quiet + steps
        loop.policy.close()  # the steps that are timed come after the run
        while loop.policy.trial is not None:
            program.timed(1, run)
        found = {
            "told": total,
            "steps_done": done,
            "seconds_done": spent,
            "settled": quiet >= QUIET,
            **by_turns(lambda steps: program.timed(steps, run), eager.timed, pairs),
        }
        status = loop.status()
    found["totals"] = {str(total): spent + (total - done) * found["eager_ms"] / found["ratio"] / 1e3}
    found["eager_totals"] = {str(total): total * found["eager_ms"] / 1e3}
    found |= {
        "tier": status.tier,
        "prepare_seconds": status.prepare_seconds,
        "tiers": [{"name": one.name, "state": one.state, "steps": one.steps, "why": one.why} for one in status.tiers],
        "decisions": list(map(str, status.decisions)),
    }
    return found | peak(device)


def child(options):
    preset, _, what = options.child.partition(":")
    if options.device == "cuda":
        torch.set_float32_matmul_precision("high")
    told = preset.removeprefix("auto told ")
    measure, way = (beside_eager, preset) if told == preset else (auto, int(told))
    row = measure(options.size, way, what, options.device, options.pairs)
    row["load"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print("ROW " + json.dumps({"row": options.child, "size": options.size, **plain(row)}))


def plain(value):
    """Round to five digits; return None for an infinite bound."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) != float("inf") else None
    return value


def run_child(options, row):
    """Measure a row in a process and a cache of its own; a failure is written into the row."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "HOTLOOP_CACHE_DIR": ""}
        command = [sys.executable, __file__, str(options.results), "--child", row, "--size", options.size]
        command += ["--device", options.device, "--pairs", str(options.pairs)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=options.limit, check=False)
        except subprocess.TimeoutExpired:
            return {"row": row, "size": options.size, "failed": f"more than {options.limit:.0f} s"}
    line = next((one for one in done.stdout.splitlines() if one.startswith("ROW ")), None)
    if line is None:
        return {"row": row, "size": options.size, "failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(line.removeprefix("ROW "))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--size", choices=ROWS, default="small")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", nargs="*", metavar="ROW")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--limit", type=float, default=1800.0)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    unknown = sorted(set(options.rows or ()) - set(ROWS[options.size]))
    if unknown:
        parser.error(f"--rows: no {', '.join(unknown)}; there are: {', '.join(ROWS[options.size])}")
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    rows = known.get("rows", [])
    for row in options.rows or ROWS[options.size]:
        if any((one["row"], one["size"]) == (row, options.size) and "failed" not in one for one in rows):
            continue
        rows = [one for one in rows if (one["row"], one["size"]) != (row, options.size)]
        rows.append(run_child(options, row))
        print(
            json.dumps({key: value for key, value in rows[-1].items() if key not in ("blocks", "decisions", "tiers")})
        )
        document = {
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "machine": torch.cuda.get_device_name() if options.device == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "rows": rows,
        }
        options.results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
