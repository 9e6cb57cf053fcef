"""Settings that do nothing beside certain others: whoever sets one is told."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import configure, schema
from hotloop.train.scope import within

if TYPE_CHECKING:
    from hotloop.train.settings import Settings


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
        ("run.tracking", "run.project"),
        ("run.logger",),
        lambda one: bool({"mlflow", "wandb"} & {*one.run.loggers}),
        "only mlflow and wandb have projects, and mlflow a server or a store",
        refused=False,
    ),
)
"""What makes settings idle that a recipe reads otherwise: the one place for it."""


def _calls_compiled(settings: Settings) -> bool:
    """Say whether what is called without gradients is to be compiled."""
    chosen = settings.compile
    return {chosen.inference, *(one.inference for one in chosen.components.values())} - {None, "none"} != set()


def refuse_idle(settings: Settings, varied: Sequence[str] = ()) -> None:
    """Refuse settings that were changed and do nothing beside the others of the run.

    Args:
        settings: the run's.
        varied: settings, or groups, that have other values in the runs that this is the beginning of: a search's.

    Raises:
        ConfigError: naming them, what they depend on, and why they do nothing.
    """
    said = [line for rule, line in _idle(settings) if rule.refused and not any(within(on, varied) for on in rule.on)]
    if said:
        raise ConfigError("; ".join(f"{one}. Leave it out" for one in said))


def remarks(settings: Settings) -> list[str]:
    """Say which settings were changed and do nothing while others are as they are, of those that are not refused."""
    return [line for rule, line in _idle(settings) if not rule.refused]


def is_idle(settings: Settings, name: str, varied: Sequence[str] = ()) -> bool:
    """Say whether a setting does nothing beside the others; ``varied`` as for `refuse_idle`."""
    return any(
        within(name, rule.names) and not rule.read(settings) and not any(within(on, varied) for on in rule.on)
        for rule in RULES
    )


def only_read(settings: Settings) -> dict[str, Any]:
    """Return what a run reads of its settings, as plain data: what its report lists. What a search does it does not."""
    plain = configure.to_dict(settings)
    del plain["hpo"]
    return _kept(plain, lambda name: not is_idle(settings, name))


def _idle(settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that make settings idle which were changed, and say of each which and why."""
    usual = dict(_leaves(_defaults(type(settings))))
    plain = dict(_leaves(configure.to_dict(settings)))
    for rule in RULES:
        changed = [one for one in plain if within(one, rule.names) and plain[one] != usual.get(one)]
        if changed and not rule.read(settings):
            names = ", ".join(f"{one}={plain[one]!r}" for one in changed)
            has = "has" if len(changed) == 1 else "have"
            on = " and ".join(f"{one}={_word(plain[one])}" for one in rule.on)
            yield rule, f"{names} {has} no effect while {on}: {rule.why}"


@functools.cache
def _defaults(model: type[Settings]) -> Mapping[str, Any]:
    """Return the settings that nobody changed."""
    return configure.to_dict(schema.build(model, {}))


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
