"""The layout of convolutions: eager, and what `auto` makes of a run with and without the tiers of another layout.

usage: python -m benchmarks.layout [--workloads resnet50,inception] [--ways ...] [--steps 1000] [--out FILE]
       [--cpu] [--float32] [--told N]

Each row is a process of its own that runs all steps, batches as torch makes them: total seconds from the begin of the
first step to the end of the last, steady ms of the last fifth, peak memory, the tier at the end, what was decided, and
the steps that kept the host longest.
``auto-as-written`` is `auto` without the layout. A GPU takes about 20 s a row; with ``--cpu`` the sizes are small, and
captured steps are stood in for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import subprocess
import sys
import time

WAYS = ("eager", "auto-as-written", "auto", "eager+graph", "channels_last+graph")
SECONDS = 240


def row(workload, way, asked):
    """Run one row in this process; return its figures."""
    import torch

    import hotloop

    from .suite.workloads import Place, build

    steps, told, cpu = asked.steps, asked.told or asked.steps, asked.cpu
    device = torch.device("cpu" if cpu else "cuda")
    if asked.float32:
        Place.autocast = lambda _place: contextlib.nullcontext
    program = build(workload, device, "cpu" if cpu else "gpu")
    with hotloop.testing.captured_step_emulation() if cpu else contextlib.nullcontext():
        loop, step = None, program.step
        if way != "eager":
            run = "auto" if way.startswith("auto") else way
            loop = hotloop.Loop(program.model, program.optimizer, run=run, total_steps=told)
            if way == "auto-as-written":
                loop.policy.candidates.declined |= {"channels_last", "channels_last+graph"}
            step = loop.step(program.step)
        torch.manual_seed(2)
        waited = torch.cuda.synchronize if not cpu else lambda: None
        waited()
        marks, took = {}, []
        begun = time.perf_counter()
        for index in range(steps):
            if index in (steps // 20, steps - steps // 5):
                waited()
                marks[index] = time.perf_counter() - begun
            batch, before = program.batch(index), time.perf_counter()
            loss = step(*batch)
            took.append((time.perf_counter() - before, index, loop.last_ran()[1] if loop else "run"))
        waited()
        seconds = time.perf_counter() - begun
    last = max(marks)
    found = {
        "workload": workload,
        "way": way,
        "steps": steps,
        "told": told,
        "seconds": seconds,
        "steady_ms": 1e3 * (seconds - marks[last]) / (steps - last),
        "slowest": [[index, kind, seconds] for seconds, index, kind in sorted(took, reverse=True)[:20]],
        "first_seconds": {str(count): at for count, at in marks.items()},
        "peak_bytes": None if cpu else torch.cuda.max_memory_allocated(),
        "loss": float(loss),
        "torch": torch.__version__,
        "device": "cpu" if cpu else torch.cuda.get_device_name(),
    }
    if loop is not None:
        status = loop.status()
        found |= {
            "tier": status.tier,
            "tiers": [f"{one.name}: {one.state} {one.steps} {one.why}" for one in status.tiers],
            "decided": [one["reason"] for one in loop.record.document["decisions"]],
        }
        loop.close()
    return found


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout", description=__doc__.partition("\n")[0])
    parser.add_argument("--workloads", default="resnet50,inception")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--told", type=int, default=0, help="the steps that `auto` is told, where the run is cut short")
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--float32", action="store_true", help="without autocast; cuDNN computes in TF32, torch's default"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("ROW " + json.dumps(row(*asked.child, asked)), flush=True)
        return
    rows = []
    for workload in asked.workloads.split(","):
        eager = None
        for way in asked.ways.split(","):
            command = [sys.executable, "-m", "benchmarks.layout", "--child", workload, way, "--steps", str(asked.steps)]
            try:
                ran = subprocess.run(
                    [
                        *command,
                        "--told",
                        str(asked.told),
                        *(["--cpu"] if asked.cpu else []),
                        *(["--float32"] if asked.float32 else []),
                    ],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS,
                    check=False,
                )
                told = [line.removeprefix("ROW ") for line in ran.stdout.splitlines() if line.startswith("ROW ")]
                error = ran.stderr[-1500:]
            except subprocess.TimeoutExpired:
                told, error = [], f"longer than {SECONDS} s"
            found = json.loads(told[0]) if told else {"workload": workload, "way": way, "error": error}
            rows.append(found)
            if asked.out:
                asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
            if "error" in found:
                print(f"{workload:10} {way:20} failed: {error}", flush=True)
                continue
            eager = found["seconds"] if way == "eager" else eager
            ratio = f"{found['seconds'] / eager:5.2f} x eager" if eager else ""
            peak = f"{found['peak_bytes'] / 2**30:6.2f} GiB" if found["peak_bytes"] else ""
            print(
                f"{workload:10} {way:20} {found['seconds']:8.2f} s {ratio} {found['steady_ms']:8.2f} ms {peak} "
                f"{found.get('tier', '')} loss {found['loss']:.4f}",
                flush=True,
            )
            for line in [*found.get("decided", ()), *found.get("tiers", ())]:
                print(f"    {line}", flush=True)


if __name__ == "__main__":
    main()
