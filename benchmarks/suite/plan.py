"""The plan of the suite, row by row, with an estimate of each row's seconds, its parts, and the choice of rows.

No torch here, so that the plan is printed at once on any machine.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util

from .totals import LONG, LONGEST, MEDIUM, SHORT, best_fixed

TIERS = ("eager+graph", "regional", "regional+graph", "full", "full+graph", "autotune+graph")
FIRST_FIVE = ("tiny", "xlmr", "inception", "gpt", "unet")
WORKLOADS = (*FIRST_FIVE, "xlmr-lengths", "vit", "lora", "mlp")
HARD = ("resnet50", "convnext", "speech", "t5", "deberta", "ppo", "vae", "lstm")
"""Workloads of which the ways of `CHOICE` are measured alone: layouts, and steps that are hard to capture whole."""
LORA = ("lora-0.2b", "lora-1b", "lora-3b")
"""Fine-tuning under gradient checkpointing with dropout: `auto` and the captured tiers beside eager."""
CHOICE = ("eager", "default", "reduce-overhead", "auto")
"""The ways between which a user chooses; of `auto` a run that is told 1,000 steps and one that is told 10,000."""
PARTS = {
    "choice": "eager, torch.compile and `auto` told 1,000 and 10,000; --part choice takes such rows of other parts too",
    "ways": "every fixed way: cold seconds, steady step time beside eager, memory, busy time",
    "auto": "`auto`, really run to 1,000 steps twice and to 200 five times",
    "auto-long": "`auto` told 10,000 and 100,000 steps, run until it has settled: what those totals are computed from",
    "cold": "cold seconds a second time, where they decide a goal",
    "more": "workloads and ways that no goal of step times names",
    "autotune": "autotuned ways",
    "lora": "LoRA of Llamas under gradient checkpointing: eager, the captured tiers, `auto` told 1,000",
    "presets": "unet under presets, and unet + text encoder + VAE against unet alone",
}
PACKAGES = {
    "xlmr": ("transformers",),
    "xlmr-lengths": ("transformers",),
    "inception": ("torchvision",),
    "resnet50": ("torchvision",),
    "convnext": ("torchvision",),
    "speech": ("transformers",),
    "t5": ("transformers",),
    "deberta": ("transformers",),
    "unet": ("diffusers",),
    "diffusion": ("diffusers", "transformers"),
    **dict.fromkeys(("lora", *LORA), ("transformers", "peft")),
}
"""Packages that a workload needs beside torch; rows without them are skipped and say so."""
NO_BLOCKS = ("inception", "mlp")
VARYING = ("xlmr-lengths",)
AUTOTUNED = ("tiny", "gpt")
CHECKED = {"tiny": ("eager", "default", "full+graph"), "xlmr": ("eager", "default", "full+graph")}
"""Ways for which a real run of 1,000 steps checks the computed totals."""
LEFT_OUT = {
    "tiers by name": f"not on {', '.join(HARD)}, where the choice between torch.compile and `auto` is measured",
    "regional, regional+graph": f"not on {', '.join(NO_BLOCKS)}, whose models have no repeated blocks",
    "autotune+graph, max-autotune-no-cudagraphs": f"only on {', '.join(AUTOTUNED)}: elsewhere autotuning takes many "
    "minutes; a row whose way is named in full after --only runs all the same",
}

# Seconds of eager's first three steps; ms of an eager step; seconds to compile the whole, by blocks, to capture. They
# serve the estimates only, no result. Those of the first five come from an H200 (2026-11-20), the others are guesses.
_GUESSES = {
    "tiny": (2.1, 16.8, 20.5, 8, 1),
    "xlmr": (1.9, 36, 29, 7.5, 2.5),
    "inception": (1.1, 41.5, 116, 0, 1),
    "gpt": (1.4, 49.5, 19, 11.5, 1.5),
    "unet": (8.4, 111, 134, 85, 3),
    "xlmr-lengths": (3, 40, 60, 25, 8),
    "vit": (1.5, 30, 25, 8, 2),
    "lora": (1.5, 30, 30, 10, 2),
    "mlp": (1, 2, 8, 0, 0.5),
    "diffusion": (10, 160, 200, 0, 0),
    "resnet50": (2, 30, 45, 0, 2),
    "convnext": (2, 45, 45, 12, 2),
    "speech": (2, 60, 90, 20, 4),
    "t5": (2, 50, 60, 15, 2),
    "deberta": (2, 70, 60, 15, 3),
    "ppo": (1, 5, 15, 0, 1),
    "vae": (1, 4, 20, 0, 1),
    "lstm": (1.5, 8, 20, 0, 1),
    "lora-0.2b": (2, 170, 40, 15, 2),
    "lora-1b": (3, 210, 50, 20, 3),
    "lora-3b": (6, 340, 80, 25, 5),
}
_START, _STEADY, _AUTOTUNE, _FIRST = 8.0, 6.0, 140.0, 24
_UNSEEN_MS = 145
"""An eager step of a new length, with the setup of libraries for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One process of the suite.

    Args:
        kind: ``ways`` (cold, steady time, memory, busy time), ``cold`` (cold once more) or ``auto`` (a real run).
        part: one of `PARTS`.
        workload: a name of `workloads.MAKERS`.
        ways: the first pays for what is cold; those after it share its caches.
        number: of the repeat.
        steps: of a real run; 0 where there is none.
        told: what `auto` is told as its total steps.
        emulated: captured steps are stood in for.
        seconds: an estimate.
    """

    kind: str
    part: str
    workload: str
    ways: tuple[str, ...]
    number: int = 1
    steps: int = 0
    told: int | None = None
    emulated: bool = False
    seconds: float = 0.0

    @property
    def name(self):
        """The row's name among those of its workload."""
        if self.kind == "auto":
            return f"auto told {self.told} (run {self.number})"
        return ",".join(self.ways) + (f", cold {self.number}" if self.kind == "cold" else "")

    @property
    def key(self):
        """The row's key in the result file."""
        return f"{self.workload}:{self.name}"


def gpu(document=None):
    """Return all rows for a GPU; which ways have their cold seconds repeated depends on what a result file holds."""
    rows = [row for workload in WORKLOADS for row in _of_workload(workload)]
    rows += [row for workload in HARD for row in _choice(workload)]
    rows += [row for workload in LORA for row in _lora(workload)]
    rows += _cold_rows(document or {"rows": []})
    rows += [_ways("unet", f"preset:{name}", part="presets") for name in ("default", "aot_eager", "inductor", "triton")]
    rows += [_ways("diffusion", way, part="presets") for way in ("eager", "components:unet", "components:all")]
    return rows


def cpu():
    """Return the subset for a CPU: small sizes, few steps, captured steps stood in for."""
    rows = [_small(workload, "eager") for workload in HARD]
    rows += [_small(workload, way) for workload in LORA[:1] for way in ("eager", "eager+graph")]
    for workload in (*WORKLOADS, "diffusion"):
        rows.append(_small(workload, "eager"))
        if workload in VARYING:
            rows.append(_small(workload, "eager+buckets"))
        if workload != "diffusion":
            rows.append(_small(workload, "eager+graph"))
    rows += [_small("tiny", "full"), _small("tiny", "regional"), _small("tiny", "default"), _small("mlp", "default")]
    rows += [_small("mlp", "reduce-overhead"), _small("unet", "preset:aot_eager")]
    rows += [
        Row(kind="auto", part="auto", workload=name, ways=("auto",), number=number, steps=told, told=told, seconds=20)
        for name in ("tiny", "mlp")
        for told, number in ((SHORT, 1), (SHORT, 2), (MEDIUM, 1))
    ]
    return rows


def _small(workload, way):
    steps = 100 if workload in VARYING else SHORT if way in CHECKED.get(workload, ()) else 0
    seconds = 8 if way.startswith("eager") else 30
    graph = way.endswith("+graph")
    return Row(kind="ways", part="ways", workload=workload, ways=(way,), steps=steps, emulated=graph, seconds=seconds)


def _of_workload(workload):
    varies = workload in VARYING
    rows = [_ways(workload, "eager")] + ([_ways(workload, "eager+buckets")] if varies else [])
    rows += [_ways(workload, "eager+graph"), _ways(workload, "full+graph", "full")]
    rows += [] if workload in NO_BLOCKS else [_ways(workload, "regional+graph", "regional")]
    rows += [_ways(workload, mode, part="more" if varies else "ways") for mode in ("default", "reduce-overhead")]
    rows += [_auto(workload, MEDIUM, number) for number in (1, 2)]
    rows += [_auto(workload, SHORT, number) for number in range(1, 6)]
    rows += [_auto(workload, told, 1) for told in ((LONG, LONGEST) if workload in FIRST_FIVE else (LONG,))]
    if workload in AUTOTUNED:
        rows += [_ways(workload, way, part="autotune") for way in ("autotune+graph", "max-autotune-no-cudagraphs")]
    if workload not in (*FIRST_FIVE, *VARYING):
        rows = [dataclasses.replace(row, part="more") for row in rows]
    return rows


def _choice(workload):
    rows = [_ways(workload, way) for way in CHOICE[:-1]] + [_auto(workload, told, 1) for told in (MEDIUM, LONG)]
    return [dataclasses.replace(row, part="choice") for row in rows]


def _lora(workload):
    rows = [_ways(workload, way) for way in ("eager", "eager+graph", "regional+graph")] + [_auto(workload, MEDIUM, 1)]
    return [dataclasses.replace(row, part="lora") for row in rows]


def in_part(row, part):
    """Return whether a row belongs to a part: rows of `CHOICE` belong to the part of that name as well."""
    if part != "choice" or row.part == part:
        return row.part == part
    told = row.kind == "auto" and row.told in (MEDIUM, LONG) and row.number == 1
    return row.workload in WORKLOADS and (told or (row.kind == "ways" and row.ways[0] in CHOICE))


def _cold_rows(document):
    """Repeat ``eager+graph`` (it has a goal), and the best fixed ways at 1,000 and 10,000 steps as far as known."""
    rows = []
    for workload in FIRST_FIVE:
        best = [best_fixed(document["rows"], workload, steps) for steps in (MEDIUM, LONG)]
        ways = dict.fromkeys(["eager+graph", *(one["way"] for one in best if one)])
        rows += [_cold(workload, way) for way in ways if way != "eager"]
    return rows


def _ways(workload, *ways, part="ways"):
    steps = MEDIUM if workload in VARYING or ways[0] in CHECKED.get(workload, ()) else 0
    seconds = round(_seconds(workload, ways, steps))
    return Row(kind="ways", part=part, workload=workload, ways=ways, steps=steps, seconds=seconds)


def _cold(workload, way):
    seconds = round(_seconds(workload, (way,), 0) - _STEADY)
    return Row(kind="cold", part="cold", workload=workload, ways=(way,), number=2, seconds=seconds)


def _auto(workload, told, number):
    eager_cold, ms, *_, capture = _GUESSES[workload]
    steps = min(told, MEDIUM)
    seconds = _START + 2 * eager_cold + capture + 0.7 * steps * ms / 1e3 + (3 if told == SHORT else _STEADY)
    if told >= LONG:
        seconds += min(_GUESSES[workload][2], 120)
    part = "auto" if told < LONG else "auto-long"
    return Row(
        kind="auto",
        part=part,
        workload=workload,
        ways=("auto",),
        number=number,
        steps=steps,
        told=told,
        seconds=round(seconds),
    )


def _seconds(workload, ways, steps):
    """Estimate a row that measures ways."""
    eager_cold, ms, whole, blocks, capture = _GUESSES[workload]
    first = ways[0]
    cold = capture if first.endswith("+graph") else 0.0
    if first.startswith("regional"):
        cold += blocks
    elif "autotune" in first or first in ("preset:inductor", "preset:triton"):
        cold += max(_AUTOTUNE, 3 * whole)
    elif not first.startswith("eager"):
        cold += whole
    own = _FIRST * ms / 1e3
    twin = 0.0 if first == "eager" else eager_cold + own
    more = (len(ways) - 1) * (_STEADY + own + 0.15 * whole)
    real = steps * (_UNSEEN_MS if workload in VARYING and first in ("eager", "default") else 0.7 * ms) / 1e3
    return _START + eager_cold + own + cold + twin + _STEADY + more + real


def choose(rows, only):
    """Return the rows that patterns name, as ``tiny``, ``xlmr:auto``, ``gpt:full*,default`` or ``*:eager``.

    Raises:
        ValueError: a pattern fits no row.
    """
    if not only:
        return rows
    found = []
    for pattern in only:
        workload, _, ways = pattern.partition(":")
        cold_again = any(row.key == pattern for row in rows if row.kind == "cold")  # the comma is of its name
        wanted = [ways] if cold_again else ways.split(",") if ways else ["*"]
        fitting = [
            row
            for row in rows
            if fnmatch.fnmatchcase(row.workload, workload)
            and any(fnmatch.fnmatchcase(name, want) for name in (*row.ways, row.name) for want in wanted)
        ]
        fitting = fitting or _unplanned(workload, wanted)
        if not fitting:
            known = sorted({name for row in rows if row.workload == workload for name in (*row.ways, row.name)})
            known = known or sorted({row.workload for row in rows})
            raise ValueError(f"--only {pattern!r}: no row fits; expected WORKLOAD[:WAY,...] with one of {known}")
        found += [row for row in fitting if row not in found]
    return found


def _unplanned(workload, ways):
    """Return rows that the plan leaves out and the user names in full."""
    if workload not in _GUESSES or not set(ways) <= {"autotune+graph", "max-autotune-no-cudagraphs"}:
        return []
    return [_ways(workload, way, part="autotune") for way in ways]


def missing(workload):
    """Return a message about the packages that a workload lacks here; empty where it has all."""
    lacking = [name for name in PACKAGES.get(workload, ()) if importlib.util.find_spec(name) is None]
    return f"{', '.join(lacking)} is not installed" if lacking else ""
