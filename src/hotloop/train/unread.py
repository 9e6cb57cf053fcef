"""Settings that a recipe does not read: whoever sets one is told, since it would do nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import configure

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

SOME = (
    "data", "model", "digits", "language", "pictures", "diffusion", "focus", "training.freeze_embeddings",
    "recipe.goal",
)  # fmt: skip
"""Settings and groups of them that only some recipes read; the fit loop reads all others."""
READS: Mapping[str, tuple[str, ...]] = {
    "criteria": ("data", "model", "training.freeze_embeddings"),
    "digits": ("data.sample_size", "data.validation_fraction", "model.dropout", "digits"),
    "language": ("data.sample_size", "data.validation_fraction", "model.dropout", "language"),
    "diffusion": ("data.sample_size", "data.validation_fraction", "pictures", "diffusion"),
    "focus": ("data.validation_fraction", "focus"),
    "workload": ("recipe.goal",),
}
"""Those of `SOME` that each recipe reads: settings, or groups of them."""
NOT_READ: Mapping[str, tuple[str, ...]] = {
    "focus": ("training.gradient_accumulation", "compile.components.loss"),
    "workload": (
        "kfold",
        "run.device",
        *(
            f"training.{name}"
            for name in (
                "batch_size",
                "eval_batch_size",
                "gradient_accumulation",
                "learning_rate",
                "warmup_fraction",
                "weight_decay",
                "max_grad_norm",
                "optimization.use_bf16",
                "optimization.use_fp16",
            )
        ),
    ),
}
"""What a program of one's own decides itself, though other recipes read it."""


def refuse(settings: Settings, reads: Sequence[str], beside: Sequence[str] = ()) -> None:
    """Refuse settings that were changed and are not read.

    Args:
        settings: the run's.
        reads: those of `SOME` that the recipe reads: settings, or groups of them.
        beside: what the recipe does not read besides, though others do.

    Raises:
        ConfigError: naming each of them, and what is read instead.
    """
    usual = _defaults(configure.recipe_choice(settings.recipe.name))
    changed = [
        f"{name}={value!r}"
        for name, value in _leaves(configure.to_dict(settings))
        if not is_read(name, reads, beside) and value != usual.get(name)
    ]
    if changed:
        read = f"of these groups it reads {', '.join(reads)}" if reads else "its program has all of that in itself"
        raise ConfigError(
            f"recipe={settings.recipe.name} does not read {', '.join(changed)}: leave it out ({read}; docs/recipes.md)"
        )


def is_read(name: str, reads: Sequence[str], beside: Sequence[str] = ()) -> bool:
    """Say whether a recipe reads a setting; ``reads`` and ``beside`` as for `refuse`."""
    return _within(name, reads) or not _within(name, (*SOME, *beside))


def by_program(settings: Settings, name: str) -> bool:
    """Say whether a setting would do nothing, since the run's program is the user's own and decides that itself."""
    return ":" in settings.recipe.name and _within(name, (*SOME, *NOT_READ["workload"]))


@functools.cache
def _defaults(recipe: str) -> Mapping[str, Any]:
    """Give the settings of a recipe that nobody changed, by dotted name."""
    return dict(_leaves(configure.to_dict(configure.load([f"recipe={recipe}"]))))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _within(name: str, groups: Sequence[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in groups)
