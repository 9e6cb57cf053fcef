"""The space of a search: which settings vary and how, checked against the settings themselves before a trial begins."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import grammar, schema
from hotloop.train.optional import require
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optuna

KINDS = ("log", "float", "int", "choices")
_WORDS = (*KINDS, "step", "when")
NOT_SEARCHED = ("recipe", "hpo", "kfold", "engine", "run", "data.path", "pictures.path")
"""Settings that say what a search is, and not what a run learns."""

KEPT = ("recipe", "data", "pictures", "kfold", "run")
"""Groups that an inner search has no say in: they say who is held out."""

CHANGES_CODE = (
    "model.name",
    "model.dropout",
    "model.max_length",
    "model.buckets",
    "pictures",
    "diffusion",
    "focus",
    "training.batch_size",
    "training.freeze_embeddings",
    "training.optimization.use_bf16",
    "training.optimization.use_fp16",
    "training.optimizer",
    "training.optimizer_options",
    "compile",
    GROUP,
)
"""Settings, or groups of them, of which each value is compiled anew: other shapes, constants or operations. What a
program varies by its logarithm is taken for a rate or a weight, which code does not depend on."""


@dataclasses.dataclass(frozen=True)
class Searched:
    """One setting that varies.

    Args:
        name: its dotted name.
        kind: one of `KINDS`.
        values: the ends of a range, both included, or the choices.
        step: the distance of neighbours in a range; None leaves any value in between.
        when: settings with the values under which this one varies; elsewhere it is the run's own.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    step: float | None = None
    when: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def changes_code(self) -> bool:
        """Whether each of its values is compiled anew."""
        is_rate = self.kind == "log" and not self.whole and is_within(self.name, (GROUP,))
        return is_within(self.name, CHANGES_CODE) and not is_rate

    @property
    def whole(self) -> bool:
        """Whether its values are integers: ends of ``log`` are written as numbers with a point where they are not."""
        return self.kind == "int" or (self.kind == "log" and all(isinstance(one, int) for one in self.values))

    def distinct(self) -> int | None:
        """Count its values; None where there is no end of them."""
        if self.kind == "choices":
            return len(self.values)
        if self.step is None:
            return None
        low, high = self.values
        return int((high - low) / self.step + 1e-9) + 1

    def suggest(self, trial: optuna.trial.BaseTrial) -> Any:
        """Ask the study's sampler for a value."""
        if self.kind == "choices":
            return trial.suggest_categorical(self.name, self.values)
        low, high = self.values
        log = self.kind == "log"
        if self.whole:
            return trial.suggest_int(self.name, low, high, step=int(self.step or 1), log=log)
        return trial.suggest_float(self.name, low, high, step=self.step, log=log)


@dataclasses.dataclass(frozen=True)
class Space:
    """Every setting that varies, each behind those that it depends on."""

    searched: tuple[Searched, ...]

    def suggest(self, trial: optuna.trial.BaseTrial, settings: Settings) -> dict[str, Any]:
        """Ask the sampler for the values of a trial.

        Args:
            trial: Optuna's trial.
            settings: those of every trial; a condition on what is not searched is judged by them.
        """
        chosen: dict[str, Any] = {}
        for one in self.searched:
            if all(value_of(name, chosen, settings) in allowed for name, allowed in one.when.items()):
                chosen[one.name] = one.suggest(trial)
        return chosen

    def shared_runs(self, trials: float) -> float:
        """Return how many of so many trials will use the same compiled code, at least 1."""
        kinds = math.prod(one.distinct() or trials for one in self.searched if one.changes_code)
        return max(1.0, trials / max(1.0, kinds))


def override(name: str, value: Any) -> str:
    """Return a value as an override in the grammar of the command line, which gives exactly this value back."""
    return f"{name}={grammar.written(value)}"


def parse(settings: Settings) -> Space:
    """Read and check ``hpo.space``.

    Raises:
        ConfigError: naming what cannot be used, with what was expected.
    """
    model = type(settings)
    left = [_searched(model, name, given) for name, given in _ranges(model, settings.hpo.space)]
    if not left:
        raise ConfigError("hpo.space is empty: expected a setting to vary, such as training.learning_rate")
    ordered: list[Searched] = []
    while left:  # each behind those that it depends on
        waiting = {one.name for one in left}
        ready = [one for one in left if not waiting.intersection(one.when)]
        if not ready:
            raise ConfigError(f"hpo.space: {' and '.join(sorted(waiting))} depend on one another by when")
        ordered += ready
        left = [one for one in left if one not in ready]
    return Space(tuple(ordered))


def flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk nested settings, such as ``hpo.trial``, as dotted names and values; null takes a group of settings out."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if value is None and _is_group(name) and schema.problem(Settings, name, None):
            continue
        if isinstance(value, Mapping) and (_is_group(name) or is_within(name, (GROUP,))):
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def trial_changes(settings: Settings) -> dict[str, Any]:
    """Return what of ``hpo.trial`` is not as the run's own settings have it, by dotted name."""
    return {name: value for name, value in flat(settings.hpo.trial) if value != value_of(name, {}, settings)}


def varied(settings: Settings) -> tuple[str, ...]:
    """Name the settings that a search's runs do not have as ``settings`` have them."""
    return (*trial_changes(settings), *(one.name for one in parse(settings).searched))


def with_hpo(settings: Settings, **changed: Any) -> Settings:
    """Return settings of which those of the search are others."""
    return settings.model_copy(update={"hpo": settings.hpo.model_copy(update=changed)})


def value_of(name: str, chosen: Mapping[str, Any], settings: Settings) -> Any:
    """Return the value of a setting in a trial; one that is chosen goes before the run's own."""
    if name in chosen:
        return chosen[name]
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def is_within(name: str, groups: Sequence[str]) -> bool:
    """Return whether a name is one of some groups and settings, or below one of them."""
    return any(name == one or name.startswith(f"{one}.") for one in groups)


def _ranges(model: Any, given: Any, prefix: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Walk to the range of each searched setting; null takes one out."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if value is None and schema.at(Settings, name):
            continue
        _check_name(model, name, "hpo.space")
        has_words = isinstance(value, Mapping) and not set(_WORDS).isdisjoint(value)
        if not isinstance(value, Mapping) or (has_words and _is_group(name)):
            raise ConfigError(f"hpo.space.{name}={value!r}: expected a setting with {{log: [low, high]}} or the like")
        if is_within(name, NOT_SEARCHED):
            raise ConfigError(f"hpo.space.{name}: this says what the search is, and cannot vary in it")
        if has_words or not (_is_group(name) or is_within(name, (GROUP,))):
            yield name, value
        else:
            yield from _ranges(model, value, f"{name}.")


def _check_name(model: Any, name: str, where: str) -> None:
    if schema.at(model, name) is None:
        own = {f"{GROUP}.{name}"} if GROUP in model.model_fields and "." not in name else ()
        raise ConfigError(f"{where}.{name}: {schema.unknown(model, name, also=own)}")


def _is_group(name: str) -> bool:
    found = schema.at(Settings, name)
    return found is not None and found.is_group


def _searched(model: Any, name: str, given: Mapping[str, Any]) -> Searched:
    """Read one setting's own part of the space; Optuna checks the range."""
    label, kinds, conditions = f"hpo.space.{name}", [kind for kind in KINDS if given.get(kind)], given.get("when") or {}
    known = not set(given) - set(_WORDS) and isinstance(conditions, Mapping)
    if not known or len(kinds) != 1 or not isinstance(given[kinds[0]], list | tuple):
        raise ConfigError(
            f"{label}={dict(given)}: expected a list under one of {', '.join(KINDS)}, beside it step: NUMBER, and "
            "when: {SETTING: VALUE} alone"
        )
    kind, found = kinds[0], schema.at(Settings, name)
    types = schema.members(found.kind) if found else ()
    if kind == "float" and int in types and float not in types:
        raise ConfigError(f"{label}.float: it takes an integer: use int, log or choices")
    values = tuple(map(float, given[kind])) if kind == "log" and float in types else tuple(given[kind])
    when = {key: tuple(one) if isinstance(one, list | tuple) else (one,) for key, one in conditions.items()}
    searched = Searched(name, kind, values, given.get("step"), when)
    fixed = require("optuna", "hotloop hpo", "search").trial.FixedTrial({name: values[0]})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            searched.suggest(fixed)
    except (ValueError, TypeError, UserWarning) as error:
        raise ConfigError(f"{label}.{kind}={list(values)}: {error}") from error
    for key, allowed in ((name, values), *when.items()):
        _check_name(model, key, f"{label}.when")
        for value in allowed:
            if wrong := schema.problem(Settings, key, value):
                raise ConfigError(f"{label}: {wrong}")
    return searched
