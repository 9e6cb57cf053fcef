"""Settings that a recipe has and that do nothing beside others: refused where they were changed, or said."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import configure, schema
from hotloop.train.nested import leaves, nested
from hotloop.train.scope import within

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hotloop.train.settings import Settings


@dataclasses.dataclass(frozen=True)
class Rule:
    """Settings that do nothing while others have certain values.

    Args:
        names: the settings, or groups of them; ``*`` stands for the name of any component.
        on: the others, each with the value under which the settings do nothing.
        why: what happens instead.
        refused: whether such a setting is refused; else the run says that it does nothing.
    """

    names: tuple[str, ...]
    on: Mapping[str, Any]
    why: str
    refused: bool = True

    def read(self, plain: Mapping[str, Any]) -> bool:
        """Say whether the settings are read beside others, given by dotted names."""
        there = {name: value for name, value in self.on.items() if name in plain}
        return not there or any(plain[name] != value for name, value in there.items())

    def because(self, plain: Mapping[str, Any]) -> str:
        """Say beside which others the settings do nothing, and what happens instead."""
        on = {one: plain[one] for one in self.on if one in plain}
        shown = (f"{one}={value if isinstance(value, str) else schema.shown(value)}" for one, value in on.items())
        return f"while {' and '.join(shown)}: {self.why}"


_COMPILE = "training.optimization.use_torch_compile"
RULES = (
    Rule(("kfold.workers", "kfold.engine"), {"kfold.n_splits": None}, "one run has no folds to share out"),
    Rule(
        ("engine",),
        {"hpo.engine": "local", "kfold.engine": "local"},
        "this machine runs them; set hpo.engine=ray or kfold.engine=ray",
    ),
    Rule(("compile", "cache.share"), {_COMPILE: False}, "nothing is compiled", refused=False),
    Rule(
        ("compile.preset", "compile.components.*.training", "compile.measure_eager_steps", "compile.fullgraph"),
        {_COMPILE: "auto"},
        "the hot loop chooses how training steps run",
        refused=False,
    ),
    Rule(("compile.layout",), {_COMPILE: True}, "the compiler chooses the layout; auto lays convolutions out"),
    Rule(("compile.sentinel",), {_COMPILE: True}, "only auto runs steps eagerly as well"),
    Rule(("run.strategy",), {"run.devices": 1}, "one device has the whole model"),
)
"""What makes settings idle that a recipe reads otherwise: the one place for it."""


def refuse_idle(settings: Settings, varied: Sequence[str] = ()) -> None:
    """Refuse settings that were changed and do nothing beside the others of the run.

    Args:
        settings: the run's.
        varied: settings, or groups, that have other values in the runs of a search that this begins.

    Raises:
        ConfigError: naming them, what they depend on, and why they do nothing.
    """
    said = [line for rule, line in _idle(settings, varied) if rule.refused]
    if said:
        raise ConfigError("; ".join(f"{one}. Leave it out" for one in said))


def remarks(settings: Settings) -> list[str]:
    """Say which settings were changed and do nothing, of those that are not refused."""
    return [line for rule, line in _idle(settings) if not rule.refused]


def unread(values: Mapping[str, Any], varied: Sequence[str] = ()) -> list[Rule]:
    """Return the rules by which settings do nothing beside others.

    Args:
        values: all settings as plain data.
        varied: as for `refuse_idle`.
    """
    plain = dict(leaves(values))
    return [rule for rule in RULES if not rule.read(plain) and not any(within(on, varied) for on in rule.on)]


def only_read(settings: Settings) -> dict[str, Any]:
    """Return the settings that a run reads, as plain data, without those of a search."""
    values = configure.to_dict(settings)
    off = ("hpo", "engine", *(name for rule in unread(values) for name in rule.names))
    return nested({name: value for name, value in leaves(values) if not within(name, off)})


def _idle(settings: Settings, varied: Sequence[str] = ()) -> Iterator[tuple[Rule, str]]:
    """Yield the rules that make settings idle which were changed, and say of each which and why."""
    usual, plain = _defaults(type(settings)), dict(leaves(configure.to_dict(settings)))
    for rule in unread(plain, varied):
        changed = [one for one in plain if within(one, rule.names) and plain[one] != usual.get(one)]
        if changed:
            names = ", ".join(f"{one}={plain[one]!r}" for one in changed)
            yield rule, f"{names} {'has' if len(changed) == 1 else 'have'} no effect {rule.because(plain)}"


@functools.cache
def _defaults(model: type[Settings]) -> dict[str, Any]:
    """Return the settings that nobody changed, by dotted names."""
    return dict(leaves(configure.to_dict(schema.build(model, {}))))
