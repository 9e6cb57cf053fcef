"""Every preset on a training step of two real models, on one GPU, each in a process and a compile cache of its own.

usage: python benchmarks/presets.py RESULTS.json [WORKLOAD:PRESET[:REGIONS] ...] [--limit SECONDS]

A step is forward + backward + fused AdamW under bf16 autocast, matmul precision "high". Eager and compiled steps
alternate in blocks within one process (eager, compiled, eager, compiled), so the ratio is of one run. ``cold_s`` is the
time from the first compiled step to the end of the third, with an empty cache. The gradients of the first compiled step
are compared with eager's: ``ratio`` is the worst over all tensors of rmse(float64, compiled) / rmse(float64, eager), as
torch's own accuracy check defines it, but per tensor; ``slope`` is the worst |<c, e>/<e, e> - 1| of compiled c and
eager e, over tensors above the noise. With --untimed the rows run side by side, and are compared but not timed.
Rows already in RESULTS.json are kept and not run again, so that it can be made in parts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime as dt
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

PRESETS = (
    "default",
    "aot_eager",
    "reduce-overhead",
    "inductor",
    "triton",
    "max-autotune-no-cudagraphs",
    "max-autotune",
)
# Autotuning the small UNet takes many minutes, so the autotuned presets run on a tiny one.
AUTOTUNED = ("inductor", "triton", "max-autotune-no-cudagraphs", "max-autotune")
SPECS = (
    *(f"xlmr-2:{preset}" for preset in PRESETS),
    *(f"{'unet-tiny' if preset in AUTOTUNED else 'unet-small'}:{preset}:whole" for preset in PRESETS),
    *(f"{workload}:default:{regions}" for workload in ("xlmr", "unet") for regions in ("whole", "blocks")),
)
BLOCK = 30
SIGNAL = 1e-2


def xlmr(layers):
    """XLM-R base as a cross-encoder, 16 pairs of 256 tokens; ``layers`` of its 12."""
    import torch
    from transformers import XLMRobertaConfig, XLMRobertaForSequenceClassification

    config = XLMRobertaConfig(
        vocab_size=250002,
        num_hidden_layers=layers,
        max_position_embeddings=514,
        type_vocab_size=1,
        num_labels=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = XLMRobertaForSequenceClassification(config)
    ids = torch.randint(5, 250000, (16, 256), device="cuda")
    label = torch.rand(16, device="cuda").round()

    def loss(model):
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.squeeze(-1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), label.float())

    return model, loss


def unet(channels, layers):
    """A UNet of Stable Diffusion 1.5's kind, 8 latents of 4x64x64, a denoising loss."""
    import torch
    from diffusers import UNet2DConditionModel

    cross = ["CrossAttnDownBlock2D"] * (len(channels) - 1)
    model = UNet2DConditionModel(
        sample_size=64,
        layers_per_block=layers,
        block_out_channels=channels,
        down_block_types=(*cross, "DownBlock2D"),
        up_block_types=("UpBlock2D", *(name.replace("Down", "Up") for name in cross)),
        cross_attention_dim=768,
        attention_head_dim=8,
    )
    z, noise = torch.randn(8, 4, 64, 64, device="cuda"), torch.randn(8, 4, 64, 64, device="cuda")
    time_steps, text = torch.randint(0, 1000, (8,), device="cuda"), torch.randn(8, 77, 768, device="cuda")

    def loss(model):
        kind = next(model.parameters()).dtype
        out = model(z.to(kind), time_steps, text.to(kind)).sample
        return torch.nn.functional.mse_loss(out.float(), noise)

    return model, loss


WORKLOADS = {
    "xlmr": lambda: xlmr(12),
    "xlmr-2": lambda: xlmr(2),
    "unet": lambda: unet((320, 640, 1280, 1280), 2),
    "unet-small": lambda: unet((320, 640), 1),
    "unet-tiny": lambda: unet((64,), 1),
}


def gradients(model, loss, autocast=True):
    """Run one forward and backward; return loss and gradients by name, and clear the gradients."""
    import torch

    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        value = loss(model)
    value.backward()
    found = {"loss": value.detach().clone()}
    found |= {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(compiled, eager, exact):
    """Return (worst ratio, its tensor, worst slope error) over all tensors; NaN never passes for agreement."""
    worst, at, slope = 0.0, "", 0.0
    for name in eager:
        c, e, x = compiled[name].double(), eager[name].double(), exact[name].double()
        floor = 1e-9 * x.abs().max().item() + 1e-30
        ratio = (c - x).pow(2).mean().sqrt().item() / ((e - x).pow(2).mean().sqrt().item() + floor)
        if not ratio <= worst:
            worst, at = ratio, name
        norm = (e * e).sum().item()
        if (e - x).pow(2).sum().item() < SIGNAL * norm:  # a gradient that is noise (a key's bias) has no slope
            slope = max(slope, abs((c * e).sum().item() / norm - 1))
    return worst, at, slope


def child(workload, preset, regions):
    """Measure one workload under one preset in this process; print one JSON line."""
    import copy

    import torch

    import hotloop

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    model, loss = WORKLOADS[workload]()
    model = model.to("cuda")
    exact_model = copy.deepcopy(model).double()
    exact = {name: value.cpu() for name, value in gradients(exact_model, loss, autocast=False).items()}
    del exact_model
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(model)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def block():
        times = []
        for _ in range(BLOCK):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in times][5:]

    def peak():
        return round(torch.cuda.max_memory_reserved() / 2**20)

    eager = {name: value.cpu() for name, value in gradients(model, loss).items()}
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    eager_ms, compiled_ms = block(), []
    memory = {"eager_mb": peak()}
    model.load_state_dict(start)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    hotloop.compile(model, preset, regions=regions)
    begin = time.perf_counter()
    compiled = {name: value.cpu() for name, value in gradients(model, loss).items()}
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    cold = time.perf_counter() - begin
    memory["compiling_mb"] = peak()
    ratio, at, slope = compare(compiled, eager, exact)
    timed = not os.environ.get("HOTLOOP_BENCH_UNTIMED")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    status = None
    for round_ in range(2 if timed else 1):
        compiled_ms += block()
        memory.setdefault("after_mb", peak())
        status = status or hotloop.status(model).components["model"]
        hotloop.uncompile(model)
        eager_ms += block()
        if round_ == 0:
            hotloop.compile(model, preset, regions=regions)  # equal settings: nothing is compiled again
    medians = statistics.median(eager_ms), statistics.median(compiled_ms)
    what = {"workload": workload, "preset": preset, "regions": regions}
    ran = {key: status.to_dict()[key] for key in ("state", "running", "compiles", "graph_breaks", "causes")}
    times = {"eager_ms": medians[0], "ms": medians[1], "speedup": medians[0] / medians[1], "cold_s": cold}
    losses = {"loss": compiled["loss"], "loss_eager": eager["loss"], "loss_float64": exact["loss"]}
    numbers = {
        key: round(float(value), 5) for key, value in {**times, "ratio": ratio, "slope": slope, **losses}.items()
    }
    print(json.dumps({**what, **ran, "pieces": list(status.regions), **memory, **numbers, "ratio_at": at}))


def machine():
    """Name hardware and versions."""
    import torch

    names = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    for package in ("triton", "transformers", "diffusers"):
        try:
            names[package] = __import__(package).__version__
        except ImportError:
            names[package] = None
    return {"gpu": torch.cuda.get_device_name(), "cpus": os.cpu_count(), **names}


def main():
    """Run the rows that are missing in the result file, within the time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("specs", nargs="*")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no further row is started")
    parser.add_argument("--row-limit", type=float, default=240.0, help="seconds for one row")
    parser.add_argument("--untimed", action="store_true", help="compare with eager only, all rows side by side")
    options = parser.parse_args()
    if os.environ.get("HOTLOOP_BENCH_CHILD"):
        child(*options.specs)
        return
    begin = time.monotonic()
    document = json.loads(options.results.read_text()) if options.results.is_file() else None
    document = document or {"date": dt.date.today().isoformat(), "machine": machine(), "rows": []}  # noqa: DTZ011
    document["settings"] = {
        "autocast": "bfloat16",
        "matmul_precision": "high",
        "optimizer": "fused AdamW",
        "block": BLOCK,
    }
    done = {(row["workload"], row["preset"], row["regions"]) for row in document["rows"]}
    todo = [key for key in map(key_of, options.specs or SPECS) if key not in done]
    with concurrent.futures.ThreadPoolExecutor(len(todo) if options.untimed else 1) as pool:

        def row(key):
            late = time.monotonic() - begin > options.limit
            return None if late else run_row(*key, options.row_limit, timed=not options.untimed)

        for found in filter(None, pool.map(row, todo)):
            document["rows"].append(found)
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_text(json.dumps(document, indent=1) + "\n")
            print(json.dumps({k: v for k, v in found.items() if k not in ("causes", "pieces")}), flush=True)


def key_of(spec):
    """Return (workload, preset, regions) of a row's name."""
    workload, preset, *rest = spec.split(":")
    return workload, preset, rest[0] if rest else "auto"


def run_row(workload, preset, regions, limit, *, timed):
    """Run one row in a process and a cache of its own; a failure is a row too."""
    with tempfile.TemporaryDirectory() as cache:
        env = {
            **os.environ,
            "HOTLOOP_BENCH_CHILD": "1",
            "HOTLOOP_BENCH_UNTIMED": "" if timed else "1",
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": f"{cache}/triton",
        }
        command = [sys.executable, __file__, "-", workload, preset, regions]
        failed = {"workload": workload, "preset": preset, "regions": regions}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {**failed, "error": f"not done after {limit:.0f} s"}
    if done.returncode:
        return {**failed, "error": done.stderr.strip()[-1500:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
