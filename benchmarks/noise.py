"""The distance of correct compiles from eager, tensor by tensor: the data behind the limits of ``hotloop.measure``.

usage: python benchmarks/noise.py [--device cpu] [--seeds 4] [--out src/hotloop/measure/noise.json] [--wrong]

Several small models are trained; at the first step and after some, the loss and each gradient of the compiled model are
compared with eager's from the same parameters and batch, and so are AdamW's updates from either. ``--wrong`` writes
nothing, and checks compiles against the limits: correct ones, and a gelu whose gradient is off by a factor.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import itertools
import json
import pathlib
import platform
import statistics

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from hotloop.measure import Limits, compare, differences
from hotloop.measure.limits import DEVIATIONS, RESIDUALS, SHARED

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / "src/hotloop/measure/noise.json"
H200 = ROOT / "benchmarks/results/2026-11-20-h200-presets.json"

MODES = ("float64", "float32", "bfloat16 autocast", "bfloat16 parameters")
BUCKETS = (1, 2, 32, 256, 4096)  # the least numel of each
# Right and wrong differ by three orders of magnitude, so limits fit between them; bfloat16 leaves little room.
SAFETY = {"float64": 20.0, "float32": 20.0, "bfloat16 autocast": 2.0, "bfloat16 parameters": 2.0}
STEPS = (0, 10)  # eager steps before a measurement: fresh parameters, and parameters that learned something
VOCABULARY = 256


def loss_of(scores, y):
    """Return the cross-entropy in float32 or better, as training code does it."""
    return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), y)


class Gelu(nn.Module):
    """Gelu, with a gradient that is too large by a factor, if a factor is set."""

    def __init__(self):
        super().__init__()
        self.register_buffer("excess", torch.zeros(()), persistent=False)
        self.planted = False

    def forward(self, x):
        """Return ``gelu(x)``; where a bug is planted, its gradient is 1 + excess times the right one."""
        y = F.gelu(x)
        return y + self.excess.to(y.dtype) * (y - y.detach()) if self.planted else y


class Mlp(nn.Module):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(64, 256), Gelu(), nn.LayerNorm(256)),
            *(nn.Linear(256, 256), Gelu(), nn.Linear(256, 10)),
        )

    def forward(self, x, y):
        """Return the loss of x [128, 64], labels y [128]."""
        return loss_of(self.net(x), y)

    @staticmethod
    def batch(generator):
        """Return points, labelled by a fixed function of them."""
        x = torch.randn(128, 64, generator=generator)
        return x, x[:, :10].argmax(dim=1)


class Block(nn.Module):
    """Attention and an MLP. The key's bias has no gradient but rounding: softmax cancels it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), Gelu(), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return x [B, T, W] after the block."""
        normed = self.norm_1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """A stack of blocks with tied embeddings and a learnt temperature, a parameter of one element."""

    no_gradient = ("key.bias",)

    def __init__(self, width=128, depth=3, length=64):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.temperature = nn.Parameter(torch.ones(()))
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x, y):
        """Return the loss of tokens x, y [B, T]."""
        hidden = self.tokens(x) + self.places.weight
        for block in self.blocks:
            hidden = block(hidden)
        logits = F.linear(self.norm(hidden), self.tokens.weight) * self.temperature
        return loss_of(logits.flatten(0, 1), y.flatten())

    @staticmethod
    def batch(generator):
        """Return sequences whose next token follows from the last."""
        start = torch.randint(VOCABULARY, (8, 1), generator=generator)
        tokens = (start + 7 * torch.arange(65)) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:]


class Convolutions(nn.Module):
    """Convolutions with a bias before BatchNorm, whose true gradient is 0."""

    no_gradient = ("net.0.bias", "net.3.bias", "net.6.bias")

    def __init__(self):
        super().__init__()
        widths = (3, 32, 64, 64)
        layers = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))

    def forward(self, x, y):
        """Return the loss of images x [16, 3, 32, 32], labels y [16]."""
        return loss_of(self.net(x), y)

    @staticmethod
    def batch(generator):
        """Return noise with a stripe that tells the label."""
        y = torch.randint(10, (16,), generator=generator)
        x = torch.randn(16, 3, 32, 32, generator=generator)
        x[torch.arange(16), :, 3 * y] += 2
        return x, y


class Residual(nn.Module):
    """A deep stack of BatchNorms, which magnify rounding: 25 convolutions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1, stride=2)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1, bias=False)),
                *(nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1, bias=False)),
            )
            for _ in range(12)
        )
        self.head = nn.Linear(24, 10)

    def forward(self, x, y):
        """Return the loss of images x [16, 3, 32, 32], labels y [16]."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return loss_of(self.head(x.relu().mean((2, 3))), y)

    batch = Convolutions.batch


class Encoder(nn.Module):
    """torch's own encoder."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="relu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 8)

    def forward(self, x, y):
        """Return the loss of tokens x [16, 32], labels y [16]."""
        return loss_of(self.head(self.encoder(self.tokens(x)).mean(1)), y)

    @staticmethod
    def batch(generator):
        """Return tokens, labelled by the first."""
        x = torch.randint(VOCABULARY, (16, 32), generator=generator)
        return x, x[:, 0] % 8


MODELS = {"mlp": Mlp, "gpt": Gpt, "convolutions": Convolutions, "residual": Residual, "encoder": Encoder}


def gradients(model, run, batch, mode):
    """Return the loss and all gradients of one batch, leaving the model's own alone."""
    model.zero_grad()
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=mode == "bfloat16 autocast"):
        loss = run(*batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


def updates(model, optimizer, grads):
    """Return the change that the optimizer would make to each parameter for these gradients, without making it."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    for name, p in model.named_parameters():
        p.grad = grads[name].clone()
    optimizer.step()
    found = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return found


def pairs(kind, mode, seeds, device, excess=None):
    """Yield (seed, step, eager's and the compiled model's gradients, their updates); all seeds share one compile."""
    torch.compiler.reset()
    dtype = {"float64": torch.float64, "bfloat16 parameters": torch.bfloat16}.get(mode, torch.float32)
    eager, compiled = (kind().to(device, dtype) for _ in range(2))
    for part in compiled.modules():
        if isinstance(part, Gelu) and excess is not None:
            part.planted = True
            part.excess.fill_(excess)
    compiled.compile()
    for seed in range(seeds):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        eager.load_state_dict(kind().state_dict())
        optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3)
        for step in range(max(STEPS) + 1):
            batch = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in kind.batch(generator)]
            # BatchNorm's statistics move with each call, which a call in training does not read: all see the same.
            grads = gradients(eager, eager, batch, mode)
            if step in STEPS:
                compiled.load_state_dict(eager.state_dict())
                others = gradients(compiled, compiled, batch, mode)
                yield seed, step, (grads, others), tuple(updates(eager, optimizer, each) for each in (grads, others))
            for name, p in eager.named_parameters():
                p.grad = grads[name]
            optimizer.step()


def tensors(kind, mode, seeds, device):
    """Return ("gradients" or "updates", differences, names without a true gradient) of each measurement."""
    for _, _, *both in pairs(kind, mode, seeds, device):
        for of, (reference, candidate) in zip(("gradients", "updates"), both, strict=True):
            found, mismatches = differences(reference, candidate)
            if mismatches:
                raise SystemExit(f"{kind.__name__}, {mode}: {mismatches}")
            yield of, list(found.values()), getattr(kind, "no_gradient", ())


def figures(sets, eps):
    """Return the figures of ``hotloop.measure.limits``: the largest of all sets, and no less than eps / 16."""
    found = dict.fromkeys(("base", "scalar", "own", "median", "floor", "pooled"), eps / 16)

    def note(name, value):
        found[name] = max(found[name], value)

    for each, no_gradient in sets:
        known = [d for d in each if d.tilt is not None]
        true = [d for d in known if not d.name.endswith(no_gradient)]
        median = statistics.median(d.residual for d in known if d.numel > 1)
        note("median", median)
        pool = []
        for d in true:
            if d.numel == 1:
                note("scalar", d.slope)
                continue
            explained = SHARED * d.residual + DEVIATIONS * max(d.residual, median) / d.effective**0.5
            note("base", d.slope - explained)
            # In many bits rounding flips a ReLU at its kink in few sets, which moves every tensor before it at once,
            # whatever the median. In few bits some flip in every set, and the median tells.
            if eps < 1e-6 or d.residual > RESIDUALS * median:
                note("own", d.residual)
            pool.append((d.tilt, (explained + found["base"]) ** -2))
        note("pooled", abs(sum(t * w for t, w in pool)) / sum(w for _, w in pool) - SHARED * median)
        scale = statistics.median(d.rms for d in known if d.rms)
        for d in known:
            if d.name.endswith(no_gradient):
                note("floor", d.rms_difference / scale)
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def distribution(sets):
    """Return median, 99th percentile and maximum of slope and residual of tensors that have a gradient, by size."""
    rows = []
    for least, most in itertools.pairwise((*BUCKETS, 1 << 62)):
        every = [d for each, no_gradient in sets for d in each if not d.name.endswith(no_gradient)]
        inside = [d for d in every if least <= d.numel < most and d.tilt is not None]
        if not inside:
            continue
        row = {"numel_from": least, "tensors": len(inside)}
        for measure in ("slope", "residual"):
            ordered = sorted(getattr(d, measure) for d in inside)
            at = {"median": 0.5, "p99": 0.99, "max": 1.0}
            row[measure] = {
                k: float(f"{ordered[min(len(ordered) - 1, int(q * len(ordered)))]:.3g}") for k, q in at.items()
            }
        rows.append(row)
    return rows


def measured(mode, of, sets):
    """Return the entry of one mode."""
    half = mode == "bfloat16 parameters"
    compute = mode.split()[0]
    entry = {
        "compute": compute,
        "held": "half" if half else "wide",
        "of": of,
        "derived": False,
        "how": f"{mode}: compiled against eager, {len(sets)} sets of {', '.join(MODELS)}, at steps {STEPS}",
        "safety": SAFETY[mode],
        "figures": figures(sets, torch.finfo(getattr(torch, compute)).eps),
        "at_least": {},
        "distribution": distribution(sets),
    }
    if compute == "bfloat16" and of == "gradients":
        slopes = [row["slope"] for row in json.loads(H200.read_text())["rows"] if "slope" in row]
        entry["at_least"] = {"base": max(slopes)}
        entry["at_least_how"] = f"base: the largest slope of any tensor of {H200.name}, {len(slopes)} compiles"
    return entry


def derived(entry, compute):
    """Return the entry of a dtype with 10 bits of mantissa from one of bfloat16, which has 7."""
    scale = torch.finfo(torch.float16).eps / torch.finfo(torch.bfloat16).eps
    kept = {key: value for key, value in entry.items() if key in ("held", "of", "safety")}
    scaled = {key: {k: v * scale for k, v in entry[key].items()} for key in ("figures", "at_least")}
    how = f"not measured: bfloat16's figures times {scale}, the ratio of the spacings of the numbers (2^-10 to 2^-7)"
    return {"compute": compute, **kept, "derived": True, "how": how, **scaled}


def write(device, seeds, out):
    """Measure all modes and write the document."""
    entries = []
    for mode in MODES:
        sets = {"gradients": [], "updates": []}
        for name, kind in MODELS.items():
            for of, each, no_gradient in tensors(kind, mode, seeds, device):
                sets[of].append((each, no_gradient))
            print(f"{mode}: {name}", flush=True)
        entries += [measured(mode, of, found) for of, found in sets.items()]
    low = [entry for entry in entries if entry["compute"] == "bfloat16"]
    low += [derived(entry, "float16") for entry in low] + [derived(entry, "tf32") for entry in low[:2]]
    single = next(entry for entry in entries if entry["compute"] == "float32")["figures"]["own"]
    for entry in low:
        if entry["held"] == "half" and entry["of"] == "gradients":  # eager's sums in few bits share errors over a model
            entry["at_least"]["pooled"] = entry["at_least"]["base"]
        entry["at_least"]["own"] = 4 * single  # a ReLU that flips moves a gradient as much, whatever the number of bits
    entries = [entry for entry in entries if entry not in low] + low
    document = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": "python benchmarks/noise.py",
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "backend": "inductor",
        "seeds": seeds,
        "entries": entries,
    }
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def wrong(device, seeds):
    """Print how near its limits each compile comes: right ones, and those with a wrong gelu."""
    plan = [(mode, kind, None) for mode in MODES for kind in MODELS.values()]
    plan += [(mode, kind, 0.01) for mode in MODES for kind in (Mlp, Gpt)]
    plan += [("float32", kind, 0.001) for kind in (Mlp, Gpt)]
    for mode, kind, excess in plan:
        limits = Limits.compiled(mode.split()[0]), Limits.compiled(mode.split()[0], updates=True)
        found = [
            [compare(*each, limit) for each, limit in zip(both, limits, strict=True)]
            for _, _, *both in pairs(kind, mode, seeds, device, excess)
        ]
        for of, each in zip(("gradients", "updates"), zip(*found, strict=True), strict=True):
            agreeing = sum(comparison.agrees for comparison in each)
            print(mode, kind.__name__, f"wrong by {excess}" if excess else "right", of, end=": ")
            print(
                f"{agreeing} of {len(each)} agree;", max(each, key=lambda comparison: comparison.nearness), flush=True
            )


def main():
    """Measure, or check right and wrong compiles against the limits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    parser.add_argument("--wrong", action="store_true")
    options = parser.parse_args()
    if options.wrong:
        wrong(options.device, options.seeds)
    else:
        write(options.device, options.seeds, options.out)


if __name__ == "__main__":
    main()
