"""Settings that a recipe does not read, at all or beside certain others: whoever sets one is told, for it is idle."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import configure

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

SOME = (
    "data", "model", "digits", "language", "pictures", "diffusion", "focus", "training.freeze_embeddings",
    "recipe.goal", "program",
)  # fmt: skip
"""Settings and groups of them that only some recipes read; the fit loop reads all others."""
READS: Mapping[str, tuple[str, ...]] = {
    "criteria": ("data", "model", "training.freeze_embeddings"),
    "digits": ("data.sample_size", "data.validation_fraction", "model.dropout", "digits"),
    "language": ("data.sample_size", "data.validation_fraction", "model.dropout", "language"),
    "diffusion": ("data.sample_size", "data.validation_fraction", "pictures", "diffusion"),
    "focus": ("data.validation_fraction", "focus"),
    "workload": ("recipe.goal", "program"),
}
"""Those of `SOME` that each recipe reads: settings, or groups of them."""
NOT_READ: Mapping[str, tuple[str, ...]] = {
    "focus": (
        "training.gradient_accumulation",
        "training.optimization.use_fp16",
        "run.precision",
        "compile.components.loss",
    ),
    "workload": (
        "run.device",
        "run.precision",
        *(
            f"training.{name}"
            for name in (
                "batch_size",
                "eval_batch_size",
                "gradient_accumulation",
                "optimizer",
                "optimizer_options",
                "learning_rate",
                "schedule",
                "warmup_fraction",
                "weight_decay",
                "max_grad_norm",
                "optimization.use_bf16",
                "optimization.use_fp16",
            )
        ),
    ),
}
"""What a recipe does not read, though others do: of a program of one's own, what it decides itself."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings that are read only while other ones have certain values.

    Args:
        names: the settings, or groups of them; ``*`` stands for the name of any component.
        on: what it depends on.
        read: says of a run's settings whether they are read.
        why: what is done without them where they are not.
        refused: whether such a setting is refused. One that is only switched off for a while (what is compiled, in a
            run that compiles nothing) may stay as it is, and the run says that it does nothing.
    """

    names: tuple[str, ...]
    on: tuple[str, ...]
    read: Callable[[Settings], bool]
    why: str
    refused: bool = True


def _samples(settings: Settings) -> bool:
    """Say whether a diffusion model is sampled."""
    return settings.diffusion.output or settings.diffusion.sample_every is not None


RULES = (
    Rule(
        ("pictures.path",),
        ("pictures.source",),
        lambda one: one.pictures.source != "digits",
        "the digits come with scikit-learn; pictures=folder trains on pictures of your own",
    ),
    Rule(
        ("pictures.buckets", "pictures.min_size", "pictures.skip_bad"),
        ("pictures.source",),
        lambda one: one.pictures.source == "folder",
        "its pictures are all of one size, and can all be used; pictures=folder trains on pictures of your own",
    ),
    Rule(
        ("diffusion.width", "diffusion.autoencoder_steps"),
        ("diffusion.model",),
        lambda one: one.diffusion.model == "small",
        "only diffusion.model=small has networks of that width, and an autoencoder that is trained first; other models "
        "have sizes of their own, and their VAE is used as it is",
    ),
    Rule(
        ("diffusion.lora_alpha",),
        ("diffusion.lora_rank",),
        lambda one: one.diffusion.lora_rank is not None,
        "it scales adapters, and all of the UNet is trained; set both for adapters",
    ),
    Rule(
        ("diffusion.sample_steps", "diffusion.guidance", "diffusion.prompts", "diffusion.samples"),
        ("diffusion.output", "diffusion.sample_every"),
        _samples,
        "nothing is sampled",
        refused=False,
    ),
    Rule(
        ("data.validation_fraction",),
        ("kfold.n_splits",),
        lambda one: one.kfold.n_splits is None,
        "each fold holds out its own share",
        refused=False,
    ),
    Rule(
        ("kfold.inner_splits",),
        ("kfold.inner_trials",),
        lambda one: one.kfold.inner_trials is not None or one.kfold.inner_fold is not None,
        "no fold has a search of its own",
        refused=False,
    ),
    Rule(
        ("compile",),
        ("training.optimization.use_torch_compile",),
        lambda one: one.training.optimization.use_torch_compile is not False,
        "nothing is compiled; set that to true to compile what the group compile says, or to auto to do what pays",
        refused=False,
    ),
    Rule(
        ("compile.components.text_encoder.training",),
        ("diffusion.train_text_encoder",),
        lambda one: one.diffusion.train_text_encoder,
        "a text encoder that is not trained is called without gradients alone, in the preset of "
        "compile.components.text_encoder.inference",
    ),
    Rule(
        ("compile.components.vae.training",),
        ("recipe.name",),
        lambda one: one.recipe.name != "diffusion",
        "its VAE is not trained: it is called without gradients alone, in the preset of "
        "compile.components.vae.inference",
    ),
    Rule(
        ("compile.components.vae.inference",),
        ("diffusion.cache",),
        lambda one: not one.diffusion.cache,
        "pictures are encoded once, before anything is compiled",
    ),
    Rule(
        ("compile.components.text_encoder.inference",),
        ("diffusion.cache", "diffusion.output", "diffusion.sample_every"),
        lambda one: not one.diffusion.cache or one.diffusion.train_text_encoder or _samples(one),
        "captions are encoded once, before anything is compiled, and nothing is sampled",
        refused=False,
    ),
    Rule(
        ("compile.preset", "compile.components.*.training", "compile.measure_eager_steps"),
        ("training.optimization.use_torch_compile",),
        lambda one: one.training.optimization.use_torch_compile != "auto",
        "the hot loop times eager steps itself, and chooses how training steps run",
        refused=False,
    ),
    Rule(
        ("compile.regions", "compile.dynamic", "compile.options", "compile.ladder", "compile.strict"),
        ("training.optimization.use_torch_compile", "compile.inference"),
        lambda one: one.training.optimization.use_torch_compile != "auto" or _calls_compiled(one),
        "the hot loop chooses how training steps run, and nothing else is compiled",
        refused=False,
    ),
    Rule(
        ("run.tracking",),
        ("run.logger",),
        lambda one: "mlflow" in one.run.loggers,
        "only mlflow has a server or a store",
        refused=False,
    ),
    Rule(
        ("run.project",),
        ("run.logger",),
        lambda one: bool({"mlflow", "wandb"} & {*one.run.loggers}),
        "only mlflow and wandb have projects",
        refused=False,
    ),
)
"""What makes settings idle that a recipe reads otherwise: the one place for it."""


def _calls_compiled(settings: Settings) -> bool:
    """Say whether what is called without gradients is to be compiled."""
    chosen = settings.compile
    return {chosen.inference, *(one.inference for one in chosen.components.values())} - {None, "none"} != set()


def refuse(settings: Settings, reads: Sequence[str], beside: Sequence[str] = ()) -> None:
    """Refuse settings that were changed and are not read.

    Args:
        settings: the run's.
        reads: those of `SOME` that the recipe reads: settings, or groups of them.
        beside: what the recipe does not read besides, though others do.

    Raises:
        ConfigError: naming each of them, and what is read instead.
    """
    changed = [f"{name}={value!r}" for name, value in _changed(settings) if not is_read(name, reads, beside)]
    if changed:
        read = f"of these groups it reads {', '.join(reads)}" if reads else "its program has all of that in itself"
        raise ConfigError(
            f"recipe={settings.recipe.name} does not read {', '.join(changed)}: leave it out ({read}; docs/recipes.md)"
        )


def refuse_idle(settings: Settings, varied: Sequence[str] = ()) -> None:
    """Refuse settings that were changed and do nothing beside the others of the run.

    Args:
        settings: the run's, of all of its recipe's.
        varied: settings, or groups, that have other values in the runs that this is the beginning of: a search's.

    Raises:
        ConfigError: naming them, what they depend on, and why they do nothing.
    """
    said = [line for rule, line in _idle(settings) if rule.refused and not any(_within(on, varied) for on in rule.on)]
    if said:
        raise ConfigError("; ".join(f"{one}. Leave it out" for one in said))


def remarks(settings: Settings) -> list[str]:
    """Say which settings were changed and do nothing while others are as they are, of those that are not refused."""
    return [line for rule, line in _idle(settings) if not rule.refused]


def is_idle(settings: Settings, name: str, varied: Sequence[str] = ()) -> bool:
    """Say whether a setting does nothing beside the others; ``varied`` as for `refuse_idle`."""
    return any(
        _within(name, rule.names) and not rule.read(settings) and not any(_within(on, varied) for on in rule.on)
        for rule in RULES
    )


def only_read(settings: Settings) -> dict[str, Any]:
    """Return what a run reads of its settings, as plain data: what its report lists.

    What a search does (``hpo``) no run reads, and a program of one's own is asked nothing of what it decides itself.
    """
    recipe = configure.recipe_choice(settings.recipe.name)
    reads, beside = READS.get(recipe, SOME), NOT_READ.get(recipe, ())

    def read(name: str) -> bool:
        return not _within(name, ("hpo",)) and is_read(name, reads, beside) and not is_idle(settings, name)

    return _kept(configure.to_dict(settings), read)


def _idle(settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that make settings idle which were changed, and say of each which and why."""
    recipe = configure.recipe_choice(settings.recipe.name)
    reads, beside = READS.get(recipe, SOME), NOT_READ.get(recipe, ())
    plain = dict(_leaves(configure.to_dict(settings)))
    changed = [(name, value) for name, value in _changed(settings) if is_read(name, reads, beside)]
    for rule in RULES:
        names = [f"{name}={value!r}" for name, value in changed if _within(name, rule.names)]
        if names and not rule.read(settings):
            has = "has" if len(names) == 1 else "have"
            on = " and ".join(f"{one}={_word(plain[one])}" for one in rule.on)
            yield rule, f"{', '.join(names)} {has} no effect while {on}: {rule.why}"


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _changed(settings: Settings) -> list[tuple[str, Any]]:
    """Return the settings that are not the recipe's defaults, by dotted name."""
    usual = _defaults(configure.recipe_choice(settings.recipe.name))
    return [(name, value) for name, value in _leaves(configure.to_dict(settings)) if value != usual.get(name)]


def _kept(values: Mapping[str, Any], keep: Callable[[str], bool], prefix: str = "") -> dict[str, Any]:
    """Return the settings that are to be kept, without the groups of which none is."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            if inner := _kept(value, keep, f"{prefix}{name}."):
                found[name] = inner
        elif keep(prefix + name):
            found[name] = value
    return found


def is_read(name: str, reads: Sequence[str], beside: Sequence[str] = ()) -> bool:
    """Say whether a recipe reads a setting; ``reads`` and ``beside`` as for `refuse`."""
    return _within(name, reads) or not _within(name, (*SOME, *beside))


def by_program(settings: Settings, name: str) -> bool:
    """Say whether a setting would do nothing, since the run's program is the user's own and decides that itself."""
    return ":" in settings.recipe.name and _within(name, (*SOME, *NOT_READ["workload"]))


@functools.cache
def _defaults(recipe: str) -> Mapping[str, Any]:
    """Return the settings of a recipe that nobody changed, by dotted name."""
    return dict(_leaves(configure.to_dict(configure.load([f"recipe={recipe}"]))))


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _within(name: str, groups: Sequence[str]) -> bool:
    return any(fnmatchcase(name, one) or name.startswith(f"{one}.") for one in groups)
