"""The plan: a row is a framework with one of its own ways to compile, beside eager and beside ours."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util

EAGER, THEIRS = "eager", "theirs"
STAGES = ("backward compile", "backward run")
"""Stages of injected failures: code that a compile cannot lower, and a kernel that dies in the middle of a run."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One framework.

    Args:
        name: of the row.
        theirs: the framework's own compile, as its user writes it.
        needs: packages.
        gpu, cpu: our ways on each: ``ours:default`` compiles in place, ``ours:TIER`` gives the step to a loop.
        own_step: whether the framework leaves the step to us, so that tiers are possible.
        why: what a framework's hooks make impossible.
        big: only on a GPU.
    """

    name: str
    theirs: str
    needs: tuple[str, ...]
    gpu: tuple[str, ...] = ("ours:default", "ours:full+graph", "ours:auto")
    cpu: tuple[str, ...] = ("ours:default",)
    why: str = ""
    big: bool = False

    def ours(self, size):
        """Return our ways at a size."""
        return self.gpu if size == "gpu" else self.cpu


ROWS = (
    Row("transformers", "TrainingArguments(torch_compile=True)", ("transformers", "accelerate"),
        why="clipping and the optimizer's step are the Trainer's, so a captured step is forward, loss and backward"),
    Row("lightning", "Trainer.fit(torch.compile(module))", ("lightning",)),
    Row("lightning-inception", "Trainer.fit(torch.compile(module))", ("lightning", "torchvision"), big=True),
    Row("fabric", "fabric.setup(torch.compile(model))", ("lightning",)),
    Row("accelerate", "TorchDynamoPlugin", ("accelerate",)),
    Row("accelerate-regional", "TorchDynamoPlugin(use_regional_compilation=True)", ("accelerate",)),
    Row("diffusers", "unet.compile_repeated_blocks()", ("diffusers",)),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """One process.

    Args:
        kind: ``cold`` (one way in a process and caches of its own), ``steady`` (all ways in turns), ``failure``.
        row: its name.
        ways: that it runs.
        stage: of an injected failure.
    """

    kind: str
    row: str
    ways: tuple[str, ...]
    stage: str = ""

    @property
    def key(self):
        """The job's key in the result file."""
        return ":".join(one for one in (self.row, self.kind, "+".join(self.ways), self.stage) if one)


def jobs(size):
    """Return all jobs of a size."""
    found = []
    for row in ROWS:
        if row.big and size == "cpu":
            continue
        ways = (EAGER, THEIRS, *row.ours(size))
        found += [Job("cold", row.name, (way,)) for way in ways]
        found += [Job("steady", row.name, ways)]
        inject = "ours:aot_eager" if row.name != "lightning-inception" else ""
        found += [Job("failure", row.name, (way,), stage) for way in (THEIRS, inject) if inject for stage in STAGES]
    return found


def choose(found, patterns):
    """Keep the jobs whose key or row fits one of the patterns; all without one."""
    return [one for one in found if not patterns or any(fnmatch.fnmatch(one.key, f"{p}*") for p in patterns)]


def row_of(name):
    """Return a row by name."""
    return next(row for row in ROWS if row.name == name)


def missing(row):
    """Name a package that a row needs and that is not installed; empty where there is none."""
    return next((name for name in row.needs if importlib.util.find_spec(name) is None), "")
