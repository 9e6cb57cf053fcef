# ruff: noqa: RUF001 - pages write the sign of multiplication
"""Draws the tables of README.md and the docs from result files, between the marks that name table and file.

A mark is ``<!-- suite NAME FILE -->``, with a name of `TABLES` and a file of benchmarks/results; ``<!-- suite end -->``
ends the table. A test holds pages and files together.
"""

from __future__ import annotations

import math
import pathlib
import re
import statistics

from . import document as files
from . import totals
from .totals import LONG, MEDIUM

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ("README.md", "docs/evidence/figures.md")
NAMES = {
    "tiny": "tiny: 8 layers d256, 8×64",
    "xlmr": "XLM-R base, 16×256",
    "gpt": "GPT-2 124M, 16×1024",
    "inception": "InceptionV3, 16×3×512×512",
    "resnet50": "ResNet-50, 64×3×224×224",
    "convnext": "ConvNeXt-T, 64×3×224×224",
    "unet": "UNet of Stable Diffusion 1.5, 8×4×64×64",
    "xlmr-lengths": "XLM-R base, lengths 64 to 256 in buckets",
    "vit": "ViT-B/16, 32×3×224×224",
    "speech": "Speech2Text with layer drop, 8×1000",
    "t5": "T5-small, 8×128 to 32",
    "deberta": "DeBERTa-v3 base, 16×128",
    "lstm": "LSTM of 2 layers d650, 32×35",
    "ppo": "PPO update: actor and critic d256, 4,096 moves",
    "vae": "beta-VAE of 64×64 pictures with torch.distributions, 128",
    "mlp": "MLP: 6 layers d1024, 256 points",
    "lora": "LoRA of GPT-2 124M, 8×512",
    "lora-0.2b": "LoRA of a Llama 0.2 B, checkpointed, 4×512",
    "lora-1b": "LoRA of a Llama 1 B, checkpointed, 4×512",
    "lora-3b": "LoRA of a Llama 3 B, checkpointed, 2×1024",
}
"""The rows of every table, in order."""
_MARK = re.compile(r"(<!-- suite (\w+) (\S+) -->\n)(.*?)(<!-- suite end -->)", re.DOTALL)
_COMPILED = ("default", "reduce-overhead")
_GRAPHS = ("eager+graph", "regional+graph", "full+graph")


def steps(rows):
    """Draw the ms of a step in each way, and how many times as fast as eager beside it."""
    ways = (*_GRAPHS, *reversed(_COMPILED))
    yield ["", "eager", *(f"`{way}`" for way in ways)]
    for workload, name in NAMES.items():
        fixed = totals.fixed(rows, workload)
        if "eager" in fixed:
            yield [name, _figure(fixed["eager"]["steady"]["ms"]), *(_step(fixed.get(way)) for way in ways)]


def gains(rows):
    """Draw how many times as fast as eager whole runs are that `auto` was told the length of."""
    yield ["", "told 1,000 steps", "told 10,000 steps"]
    known = {name: [totals.gains(rows, name, told) for told in (MEDIUM, LONG)] for name in NAMES}
    known = {name: found for name, found in known.items() if any(found)}
    for name, found in known.items():
        yield [NAMES[name], *(f"{_figure(statistics.median(one))}×" if one else "" for one in found)]
    means = []
    for place in (0, 1):
        those = [statistics.median(found[place]) for found in known.values() if found[place]]
        mean = math.prod(those) ** (1 / len(those)) if those else 0
        means.append(f"**{_figure(mean)}×** ({len(those)} rows)" if those else "")
    yield ["geometric mean", *means]


def seconds(rows):
    """Draw the seconds of whole runs, torch.compile's and eager's beside `auto`'s."""
    yield ["", *(f"{words}: {way}" for words in ("1,000 steps", "10,000") for way in ("eager", *_COMPILED, "`auto`"))]
    for workload, name in NAMES.items():
        fixed = totals.fixed(rows, workload)
        if "eager" not in fixed:
            continue
        cells = []
        for told in (MEDIUM, LONG):
            for way in ("eager", *_COMPILED):
                row = fixed.get(way)
                cells.append(_total(totals.total(rows, row, told) if row else None))
            runs = totals.auto_runs(rows, workload, told)
            middle = statistics.median(run["seconds"] for run in runs) if runs else None
            auto = None if middle is None else {"seconds": middle, "computed": runs[0]["computed"]}
            gain = totals.gains(rows, workload, told)
            cells.append(_total(auto) + (f" ({_figure(statistics.median(gain))}×)" if gain else ""))
        yield [name, *cells]


def memory(rows):
    """Draw peak memory, allocated and reserved: of eager, torch.compile, and `auto` while it proves and in force."""
    ways = ("eager", *_COMPILED, "`auto` told 1,000, proving", "in force", "told 10,000, proving", "in force")
    yield ["MB allocated / reserved", *ways]
    for workload, name in NAMES.items():
        fixed = totals.fixed(rows, workload)
        cells = [_memory((fixed.get(way) or {}).get("memory"), "preparing") for way in ("eager", *_COMPILED)]
        for told in (MEDIUM, LONG):
            runs = [row for row in rows if (row["kind"], row["workload"], row.get("told")) == ("auto", workload, told)]
            known = next((row["memory"] for row in runs if row.get("memory")), None)
            cells += [_memory(known, "preparing"), _memory(known, "force")]
        if any(cells):
            yield [name, *cells]


TABLES = {"steps": steps, "gains": gains, "seconds": seconds, "memory": memory}


def write(result=None):
    """Write the tables of all pages anew; return the pages that changed.

    Args:
        result: the result file to draw from, in benchmarks/results; None draws each table from the file that it names.

    Raises:
        ValueError: a mark names no table, or a file that is none of the suite's.
    """
    changed = []
    for name in PAGES:
        page = ROOT / name
        before = page.read_text(encoding="utf-8")
        if (after := drawn(before, result)) != before:
            page.write_text(after, encoding="utf-8")
            changed.append(name)
    return changed


def drawn(page, result=None):
    """Return a page's text with its tables as the result files have them; columns without a figure are left out.

    A ``result`` takes the place of the files of the same hardware.
    """
    new = None if result is None else files.load(pathlib.Path(result).resolve(), must_be_there=True)

    def table(found):
        _, kind, file, _, end = found.groups()
        if kind not in TABLES:
            raise ValueError(f"<!-- suite {kind} ... -->: expected one of {', '.join(TABLES)}")
        chosen, document = file, files.load(ROOT / file, must_be_there=True)
        if new is not None and _hardware(new) == _hardware(document):
            chosen, document = pathlib.Path(result).resolve().relative_to(ROOT).as_posix(), new
        head, *body = TABLES[kind](document["rows"])
        filled = [place for place in range(len(head)) if any(cells[place] for cells in body)]
        lines = [[cells[place] for place in filled] for cells in (head, ["---"] * len(head), *body)]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
        return f"<!-- suite {kind} {chosen} -->\n\n{text}\n\n{_source(document, chosen)}\n\n{end}"

    return _MARK.sub(table, page)


def _source(document, file):
    """Name the hardware, torch and date of a result file."""
    torch = (document.get("machine") or {}).get("torch")
    return f"{_hardware(document)}, torch {torch}, {document.get('date')}: `{file}`"


def _hardware(document):
    machine = document.get("machine") or {}
    return machine.get("gpu") or machine.get("processor")


def _step(row):
    if row is None:
        return ""
    steady = row["steady"]
    return _figure(steady["ms"]) + (f" ({_figure(steady['ratio'])}×)" if "ratio" in steady else "")


def _total(found):
    return "" if found is None else ("~" if found["computed"] else "") + _figure(found["seconds"])


def _memory(known, when):
    """Return allocated and reserved MB; files of earlier days have no reserved figure of the preparation."""
    if not known:
        return ""
    allocated, reserved = ("peak_mb", "reserved_mb") if when == "force" else ("preparing_mb", "preparing_reserved_mb")
    found = (known[allocated], known.get(reserved))
    return " / ".join(f"{one:,}" for one in found if one is not None)


def _figure(value):
    """Write a figure with three digits."""
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{digits}f}"
