"""Settings that do nothing beside certain others: whoever sets one is told."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import configure, schema
from hotloop.train.nested import leaves, nested
from hotloop.train.scope import within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.train.settings import Settings


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings that are read only while one of others has certain values.

    Args:
        names: the settings, or groups of them; ``*`` stands for the name of any component.
        on: what it depends on, with the values under which the settings are read; a function says so of any value.
        why: what is done without them where they are not.
        refused: whether such a setting is refused. One that is only switched off for a while (what is compiled, in a
            run that compiles nothing) may stay as it is, and the run says that it does nothing.
    """

    names: tuple[str, ...]
    on: Mapping[str, Callable[[Any], object] | tuple[Any, ...]]
    why: str
    refused: bool = True

    def read(self, plain: Mapping[str, Any]) -> bool:
        """Say whether the settings are read beside others, given by dotted names."""
        found = [(plain[one], wanted) for name, wanted in self.on.items() for one in plain if within(one, (name,))]
        return not found or any(wanted(value) if callable(wanted) else value in wanted for value, wanted in found)

    def because(self, plain: Mapping[str, Any]) -> str:
        """Say beside which others the settings do nothing, and what is done without them."""
        on = " and ".join(f"{one}={_word(plain[one])}" for one in self.on if one in plain)
        return f"while {on}: {self.why}"


def _set(value: Any) -> bool:
    return value is not None


def _compiles(preset: Any) -> bool:
    return preset not in (None, "none")


_COMPILE = "training.optimization.use_torch_compile"
RULES = (
    Rule(
        ("pictures.path", "pictures.buckets", "pictures.min_size", "pictures.skip_bad"),
        {"pictures.source": ("folder",)},
        "the digits come with scikit-learn, all of one size; pictures=folder trains on pictures of your own",
    ),
    Rule(
        ("diffusion.width", "diffusion.autoencoder_steps"),
        {"diffusion.model": ("small",)},
        "only diffusion.model=small has networks of that width, and an autoencoder that is trained first; other models "
        "have sizes of their own, and their VAE is used as it is",
    ),
    Rule(
        ("diffusion.lora_alpha",),
        {"diffusion.lora_rank": _set},
        "it scales adapters, and all of the UNet is trained; set both for adapters",
    ),
    *(
        Rule(
            (f"compile.components.{name}.training",),
            {f"diffusion.train_{name}": (True,)},
            "a text encoder that is not trained is called without gradients alone, in the preset of "
            f"compile.components.{name}.inference",
        )
        for name in ("text_encoder", "text_encoder_2")
    ),
    Rule(("kfold.workers", "kfold.engine"), {"kfold.n_splits": _set}, "one run has no folds to share out"),
    Rule(
        ("engine",),
        {"hpo.engine": ("ray",), "kfold.engine": ("ray",)},
        "this machine runs them; set hpo.engine=ray or kfold.engine=ray",
    ),
    Rule(
        ("compile",),
        {_COMPILE: (True, "auto")},
        "nothing is compiled; set that to true to compile what the group compile says, or to auto to do what pays",
        refused=False,
    ),
    Rule(
        ("cache.share",),
        {_COMPILE: (True, "auto")},
        "nothing is compiled, so no code is taken or given; set that to true or auto",
        refused=False,
    ),
    Rule(
        ("compile.preset", "compile.components.*.training", "compile.measure_eager_steps"),
        {_COMPILE: (True, False)},
        "the hot loop times eager steps itself, and chooses how training steps run",
        refused=False,
    ),
    Rule(
        ("compile.regions", "compile.dynamic", "compile.options", "compile.ladder", "compile.strict"),
        {_COMPILE: (True, False), "compile.inference": _compiles, "compile.components.*.inference": _compiles},
        "the hot loop chooses how training steps run, and nothing else is compiled",
        refused=False,
    ),
    Rule(
        ("compile.layout",),
        {_COMPILE: ("auto", False)},
        "what is compiled has a layout that its compiler chooses; auto has a loop that lays convolutions out",
    ),
    Rule(
        ("compile.sentinel",),
        {_COMPILE: ("auto", False)},
        "no loop owns the step, so nothing can be run eagerly as well; auto has one",
    ),
    Rule(
        ("run.strategy",),
        {"run.devices": lambda many: many > 1},
        "one device has the whole model, and more of them share it",
    ),
)
"""What makes settings idle that a recipe reads otherwise: the one place for it."""


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
    return any(within(name, rule.names) for rule in unread(configure.to_dict(settings), varied))


def unread(values: Mapping[str, Any], varied: Sequence[str] = ()) -> list[Rule]:
    """Return the rules by which settings do nothing beside others.

    Args:
        values: all settings as plain data.
        varied: as for `refuse_idle`.
    """
    plain = dict(leaves(values))
    return [rule for rule in RULES if not rule.read(plain) and not any(within(on, varied) for on in rule.on)]


def only_read(settings: Settings) -> dict[str, Any]:
    """Return what a run reads of its settings, as plain data: what its report lists. What a search does it does not."""
    plain = dict(leaves(configure.to_dict(settings)))
    unread = [name for rule in RULES if not rule.read(plain) for name in rule.names]
    return nested({name: value for name, value in plain.items() if not within(name, ("hpo", "engine", *unread))})


def _idle(settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that make settings idle which were changed, and say of each which and why."""
    usual = dict(leaves(_defaults(type(settings))))
    plain = dict(leaves(configure.to_dict(settings)))
    for rule in RULES:
        changed = [one for one in plain if within(one, rule.names) and plain[one] != usual.get(one)]
        if changed and not rule.read(plain):
            names = ", ".join(f"{one}={plain[one]!r}" for one in changed)
            has = "has" if len(changed) == 1 else "have"
            yield rule, f"{names} {has} no effect {rule.because(plain)}"


@functools.cache
def _defaults(model: type[Settings]) -> Mapping[str, Any]:
    """Return the settings that nobody changed."""
    return configure.to_dict(schema.build(model, {}))


def _word(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
