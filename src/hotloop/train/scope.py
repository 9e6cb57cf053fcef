"""Which settings each recipe has, and which may change while runs stay comparable."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hotloop.train.settings import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RECIPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "criteria": (("data", "model", "training.freeze_embeddings"), ()),
    "diffusion": (("data.sample_size", "data.validation_fraction", "pictures", "diffusion"), ("run.strategy",)),
    "focus": (
        ("data.validation_fraction", "focus"),
        (
            "training.gradient_accumulation", "training.ema_decay", "training.optimization.use_fp16", "run.precision",
            "run.accelerator", "run.devices", "run.strategy",
        ),
    ),
    "workload": (
        ("recipe.goal", GROUP),
        (
            "run.device", "training.batch_size", "training.eval_batch_size",
            "training.gradient_accumulation", "training.optimizer", "training.optimizer_options",
            "training.learning_rate", "training.schedule", "training.warmup_fraction", "training.weight_decay",
            "training.max_grad_norm", "training.ema_decay", "training.optimization.use_bf16",
            "training.optimization.use_fp16",
        ),
    ),
}  # fmt: skip
"""What each recipe has of the settings, or groups of them, that only some have; and what it lacks that all others have.
A program of the user's own, `workload`, decides itself what it lacks."""


def has(recipe: str, name: str) -> bool:
    """Say whether a recipe has a setting."""
    own, lacks = RECIPES[recipe]
    only_some = (one for names, _ in RECIPES.values() for one in names)
    return within(name, own) or not within(name, (*only_some, *lacks))


def within(name: str, groups: Iterable[str]) -> bool:
    """Say whether a setting is one of some, or in one of some groups; ``*`` stands for any name."""
    return any(fnmatchcase(name, one) or name.startswith(f"{one}.") for one in groups)


STILL_COMPARABLE = (
    "run", "compile", "training.optimization.use_torch_compile", "training.eval_batch_size",
    "training.checkpoint_every_steps", "training.checkpoint_every_minutes", "kfold.workers", "kfold.engine", "engine",
    "cache",
)  # fmt: skip
"""Settings, or groups of them, that may change while a search or a cross-validation goes on: its runs stay comparable.
Of the group ``run`` all but `DECISIVE`."""
DECISIVE = ("run.seed", "run.precision", "run.devices")
"""Of several devices, each has a whole batch: their number makes the batches of a step."""
