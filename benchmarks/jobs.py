"""What people really train: LoRA under checkpointing, fp16 with a GradScaler, averaged weights, whole fine-tunings.

usage: python -m benchmarks.jobs [--rows gpt2,bert] [--ways eager,eager+graph,auto] [--steps 60] [--told 1000]
       [--fraction 0.9] [--out FILE] [--cpu]

Each row is a process of its own, on batches that are new in each step. It keeps the ms of a steady step (median of the
last third, one at a time), the memory that torch has reserved (up to the first proof, while proving, in force), the
tier in force, why others were declined, and all losses. The ways of a row run one after the other on one machine,
`eager` first, and are compared with it: speed, memory, and how far the losses are apart. `--fraction` lets torch take
that share of the card only, as where a user's eager step fills it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

SECONDS = 200
_FAILED = "FAILED"


def gpt2(torch, device, small):
    """GPT-2 as Hugging Face ships it: tied embeddings, 50,257 words, dropout 0.1, 8 texts of 512 tokens."""
    import transformers

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64} if small else {}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = (2, 16) if small else (8, 512)

    def step(ids):
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return (
        model,
        optimizer,
        step,
        lambda number: (torch.randint(0, model.config.vocab_size, shape, generator=_draws(torch, number)),),
        (),
    )


def bert(torch, device, small):
    """BERT-base, two classes, 16 texts of 128 tokens, AdamW, clipping."""
    import transformers

    sizes = (
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if small else {}
    )
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    shape = (2, 16) if small else (16, 128)

    def step(ids, labels):
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(number):
        g = _draws(torch, number)
        return torch.randint(0, 30000, shape, generator=g), torch.randint(0, 2, shape[:1], generator=g)

    return model, optimizer, step, batch, ()


def vit(torch, device, small):
    """ViT-B/16 of torchvision's shape by transformers, 64 pictures."""
    import transformers

    sizes = (
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64} if small else {}
    )
    model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000, **sizes)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    count = 2 if small else 64

    def step(pixels, labels):
        with torch.autocast(device, torch.bfloat16):
            loss = model(pixel_values=pixels, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(number):
        g = _draws(torch, number)
        return torch.randn(count, 3, 224, 224, generator=g), torch.randint(0, 1000, (count,), generator=g)

    return model, optimizer, step, batch, ()


def _draws(torch, number):
    return torch.Generator().manual_seed(number)


def _unet(small):
    import diffusers

    wide = (16, 32) if small else (128, 256, 256, 512)
    return diffusers.UNet2DModel(
        sample_size=16 if small else 64,
        block_out_channels=wide,
        norm_num_groups=8,
        down_block_types=("DownBlock2D",) * (len(wide) - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (len(wide) - 1),
    )


def unet_fp16(torch, device, small):
    """A UNet in float16 with a GradScaler, RMSprop (not fused), and clipping; 16 pictures of 64 x 64."""
    model = _unet(small).to(device).train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    count, size = (2, 16) if small else (16, 64)

    def step(noisy, noise, times):
        with torch.autocast(device, torch.float16):
            loss = torch.nn.functional.mse_loss(model(noisy, times).sample.float(), noise)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    def batch(number):
        g = _draws(torch, number)
        shape = (count, 3, size, size)
        noise = torch.randn(shape, generator=g)
        return noise + torch.randn(shape, generator=g), noise, torch.randint(0, 1000, shape[:1], generator=g)

    return model, optimizer, step, batch, scaler


def ddpm_averaged(torch, device, small):
    """The DDPM of a tutorial: AdamW, bfloat16, and torch's AveragedModel with EMA, updated within the step."""
    from torch.optim import swa_utils

    model = _unet(small).to(device).train()
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    count, size = (2, 16) if small else (16, 64)

    def step(noisy, noise, times):
        with torch.autocast(device, torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(noisy, times).sample.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss

    def batch(number):
        g = _draws(torch, number)
        shape = (count, 3, size, size)
        noise = torch.randn(shape, generator=g)
        return noise + torch.randn(shape, generator=g), noise, torch.randint(0, 1000, shape[:1], generator=g)

    return model, optimizer, step, batch, average


def _of_suite(name):
    """Return a row of the suite: LoRA on all projections, dropout 0.05, gradient checkpointing."""

    def make(torch, device, small):
        from .suite.workloads import build

        program = build(name, torch.device(device), "cpu" if small else "gpu")
        return program.model, program.optimizer, program.step, program.batch, ()

    return make


ROWS = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "unet-fp16": unet_fp16,
    "ddpm-averaged": ddpm_averaged,
    **{name: _of_suite(name) for name in ("lora-0.2b", "lora-1b", "lora-3b")},
}


def row(asked):
    """Run one row in this process; return its figures."""
    import torch

    import hotloop

    device = "cpu" if asked.cpu else "cuda"
    if asked.fraction is not None and not asked.cpu:
        torch.cuda.set_per_process_memory_fraction(asked.fraction)
    torch.manual_seed(0)
    model, optimizer, step, batch, state = ROWS[asked.row](torch, device, asked.cpu)
    wait = torch.cuda.synchronize if not asked.cpu else lambda: None
    loop, emulated = None, hotloop.testing.captured_step_emulation() if asked.cpu else contextlib.nullcontext()
    with emulated:
        if asked.way != "eager":
            loop = hotloop.Loop(model, optimizer, run=asked.way, state=state, total_steps=asked.told)
            step = loop.step(step)
        losses, took = [], []
        torch.manual_seed(2)
        begun = time.perf_counter()
        for number in range(asked.steps):
            given = [one.to(device) for one in batch(number)]
            wait()
            before = time.perf_counter()
            losses.append(step(*given).detach().clone())
            wait()
            took.append(time.perf_counter() - before)
        total = time.perf_counter() - begun
    found = {
        "ms": statistics.median(took[-(asked.steps // 3) :]) * 1e3,
        "seconds": total,
        "losses": torch.stack(losses).tolist(),
        "steps": asked.steps,
    }
    if not asked.cpu:
        found["peak_reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        found["reserved_gb"] = torch.cuda.memory_reserved() / 1e9
    if loop is not None:
        status = loop.status()
        found["tier"] = status.tier
        figures = status.memory.figures() if status.memory is not None else {}
        found["memory_gb"] = {name: taken and taken / 1e9 for name, taken in figures.items()}
        found["declined"] = {one.name: one.why for one in status.tiers if one.state == "declined"}
        found["proven_at"] = next((n for n, seconds in enumerate(took) if seconds < 1.2 * found["ms"] / 1e3), None)
    return found


def compared(found, eager):
    """Hold a way's figures against eager's."""
    if _FAILED in found or _FAILED in eager:
        return {}
    apart = max(abs(one - other) for one, other in zip(found["losses"], eager["losses"], strict=True))
    held = {"speed": eager["ms"] / found["ms"], "largest_difference_of_losses": apart}
    if "peak_reserved_gb" in eager:
        held["proving_over_eager"] = found["peak_reserved_gb"] / eager["peak_reserved_gb"]
        held["in_force_over_eager"] = found["reserved_gb"] / eager["peak_reserved_gb"]
    return held


def main():
    """Run rows by ways, each in a process, and write one document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--ways", default="eager,eager+graph,auto")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--told", type=int, default=1000)
    parser.add_argument("--fraction", type=float)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.row:
        print(json.dumps(row(asked)))
        return
    from .suite import document

    results, name = {}, "cpu" if asked.cpu else "cuda"
    settings = {"steps": asked.steps, "told": asked.told, "fraction": asked.fraction}
    for workload in asked.rows.split(","):
        ways = results[workload] = {}
        for way in asked.ways.split(","):
            command = [sys.executable, "-m", "benchmarks.jobs", *sys.argv[1:], "--row", workload, "--way", way]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
                last = (done.stdout.strip().splitlines() or [""])[-1]
                found = json.loads(last) if done.returncode == 0 else {_FAILED: done.stderr[-2000:]}
            except subprocess.TimeoutExpired:
                found = {_FAILED: f"no end within {SECONDS} s"}
            ways[way] = found
            if way != "eager" and "eager" in ways:
                found |= compared(found, ways["eager"])
            shown = {key: value for key, value in found.items() if key != "losses"}
            print(workload, way, json.dumps(shown, default=str), flush=True)
            if asked.out:
                made = {"date": document.today(), "machine": document.machine(name), **settings, "rows": results}
                asked.out.write_text(json.dumps(made, indent=1) + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    main()
