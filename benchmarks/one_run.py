"""One run with ``run="auto"``, step by step: its eager steps, its trials, and its choice.

usage: python benchmarks/one_run.py RESULT.json [--steps N] [--seconds S] [--device cpu]
       python benchmarks/one_run.py RESULT.json --picture docs/images/hot-loop.svg

Trains a small byte-level language model on the Python standard library's own source. ``--steps`` is the length that the
run is told; ``--seconds`` ends it earlier, since a decision shows in its first minutes. RESULT.json holds the time
and tier of each step, and the decisions: among them the trial, in which steps of both tiers were timed by turns.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import pathlib
import platform
import time

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 960, 380, 64, 46, 84
COLOURS = {"eager": "#7a8793", "graph": "#1b7f5c", "compiled": "#2563a8", "doing": "#d98324"}


def data(count):
    """Return batches of bytes, (8, 128) int64, of the standard library's source."""
    import torch

    text = b"".join(path.read_bytes() for path in sorted(pathlib.Path(json.__file__).parent.parent.glob("*.py")))
    source = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        starts = torch.randint(0, len(source) - 129, (8,), generator=generator)
        yield torch.stack([source[start : start + 129] for start in starts.tolist()]).long()


def train(steps, seconds, device):
    """Train with ``run="auto"``, told that the run has so many steps; end it after so many seconds."""
    import torch
    from one_run_model import LanguageModel
    from torch.nn import functional

    import hotloop

    torch.manual_seed(0)
    model = LanguageModel().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-10, fused=True)
    with hotloop.Loop(model, optimizer, total_steps=steps) as loop:

        @loop.step
        def step(tokens):
            tokens = tokens.to(device)
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        began, losses = time.perf_counter(), []
        for batch in data(steps):
            losses.append(step(batch))
            if time.perf_counter() - began > seconds:
                break
        final = losses[-1].item()
        total = time.perf_counter() - began
        document = loop.record.document
        status = loop.status().to_dict()
    kept = {key: document[key] for key in ("decisions", "verdicts")}
    each = [{key: entry[key] for key in ("seconds", "running", "doing") if key in entry} for entry in document["steps"]]
    return {"steps": len(losses), "total_seconds": total, "loss": final, "status": status, **kept, "each": each}


def measure(path, arguments):
    """Run, and write the result."""
    import torch

    result = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "hardware": hardware(arguments.device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "settings": {"told_steps": arguments.steps, "seconds": arguments.seconds, "threads": torch.get_num_threads()},
        **train(arguments.steps, arguments.seconds, arguments.device),
    }
    each = result.pop("each")
    text = json.dumps(result, indent=1)[:-2]
    lines = ",\n  ".join(json.dumps({**entry, "seconds": round(entry["seconds"], 6)}) for entry in each)
    path.write_text(f'{text},\n "each": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    for decision in result["decisions"]:
        print(f"step {decision['step']}: {decision['reason']}")


def hardware(device):
    """Name the hardware of the run."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, CPU"
    return platform.machine()


def picture(result, path):
    """Draw step time over the run's time, swaps marked, as a plain SVG."""
    each = result["each"]
    times, at = [], 0.0
    for entry in each:
        at += entry["seconds"]
        times.append(at)
    usual = sorted(entry["seconds"] for entry in each)[int(0.99 * len(each))]
    top = 1.25 * usual
    x = lambda second: LEFT + (WIDTH - LEFT - 20) * second / times[-1]  # noqa: E731 - two scales, one line each
    y = lambda seconds: HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(seconds, top) / top  # noqa: E731
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="13">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        level, moment = y(share * top), x(share * times[-1])
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{level:.1f}" y2="{level:.1f}" stroke="#e4e7ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{1e3 * share * top:.0f} ms</text>')
        parts.append(
            f'<text x="{moment:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{share * times[-1]:.0f} s</text>'
        )
    for row, (second, label) in enumerate(turns(result, times)):
        parts.append(
            f'<line x1="{x(second):.1f}" x2="{x(second):.1f}" y1="{TOP - 6}" y2="{HEIGHT - BOTTOM}" '
            'stroke="#9aa4ad" stroke-dasharray="3 3"/>'
        )
        parts.append(f'<text x="{x(second) + 4:.1f}" y="{TOP + 14 + 16 * (row % 3)}" fill="#4a545d">{label}</text>')
    for entry, second in zip(each, times, strict=True):
        colour = COLOURS["doing" if entry.get("doing") else kind(entry["running"])]
        over = entry["seconds"] > top
        mark = "4" if over or entry.get("doing") else "1.6"
        parts.append(f'<circle cx="{x(second):.1f}" cy="{y(entry["seconds"]):.1f}" r="{mark}" fill="{colour}"/>')
        if over:
            parts.append(f'<text x="{x(second) + 6:.1f}" y="{TOP + 4}" fill="{colour}">{entry["seconds"]:.1f} s</text>')
    legend = (("eager", "eager"), ("compiled", "compiled"), ("graph", "captured"), ("doing", "survey, proof, capture"))
    for index, (name, label) in enumerate(legend):
        parts.append(f'<circle cx="{LEFT + 6 + 170 * index}" cy="22" r="5" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{LEFT + 18 + 170 * index}" y="26">{label}</text>')
    parts.append(f'<text x="{LEFT}" y="52" font-weight="bold">one step</text>')
    parts.append(f'<text x="{WIDTH - 20}" y="{HEIGHT - 8}" text-anchor="end">time since the first step</text></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def turns(result, times):
    """Return the moments of the decisions that changed something, with their labels."""
    labels = {"prepare": "a child compiles {tier}", "try": "{tier} is tried", "switch": "{tier} in force"}
    for decision in result["decisions"]:
        if decision.get("action") in labels:
            moment = times[min(decision["step"], len(times) - 1)]
            yield moment, labels[decision["action"]].format(tier=decision["tier"])


def kind(tier):
    """Return the colour's name for a tier."""
    return "graph" if tier.endswith("+graph") else "eager" if tier in ("eager", "as-given") else "compiled"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.picture:
        picture(json.loads(arguments.result.read_text(encoding="utf-8")), arguments.picture)
    else:
        measure(arguments.result, arguments)


if __name__ == "__main__":
    main()
