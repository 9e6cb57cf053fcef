"""The space of a search: which settings vary and how, checked against the settings themselves before a trial begins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import grammar, schema
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optuna

KINDS = ("log", "float", "int", "choices")
_WORDS = (*KINDS, "step", "when")
MANY = 8
"""Values of one setting, at most, that are compiled without a warning."""
NOT_SEARCHED = ("recipe", "hpo", "kfold", "engine", "run", "data.path", "pictures.source", "pictures.path")
"""Settings that say what a search is, and not what a run learns."""

KEPT = ("recipe", "data", "pictures", "kfold", "run")
"""Groups that an inner search has no say in, by what it searches or by ``hpo.trial``: they say who is held out."""

CHANGES_CODE = (
    "model.name",
    "model.dropout",
    "model.max_length",
    "model.buckets",
    "digits",
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

    def holds(self, value: Any) -> bool:
        """Return whether a trial may have a value."""
        if self.kind == "choices":
            return value in self.values
        low, high = self.values
        fits = isinstance(value, int if self.whole else int | float) and not isinstance(value, bool)
        steps = (value - low) / self.step if fits and self.step else 0.0
        return fits and low <= value <= high and abs(steps - round(steps)) < 1e-6  # noqa: PLR2004 - rounding

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

    def warnings(self, trials: int) -> list[str]:
        """Return a line about each setting of which many values would be compiled."""
        found = []
        for one in (each for each in self.searched if each.changes_code):
            made = min(one.distinct() or trials, trials)
            if made > MANY:
                found.append(
                    f"hpo.space.{one.name} makes up to {made:,} values in {trials:,} trials, and each of them is "
                    "compiled anew where trials are compiled. Fewer values share code: give it choices, or a range "
                    "with a step"
                )
        return found


def override(name: str, value: Any) -> str:
    """Return a value as an override in the grammar of the command line, which gives exactly this value back."""
    return f"{name}={grammar.written(value)}"


def parse(settings: Settings) -> Space:
    """Read and check ``hpo.space``.

    Raises:
        ConfigError: listing everything in it that cannot be used, with what was expected.
    """
    problems: list[str] = []
    model = type(settings)
    found = [_searched(name, given, problems) for name, given in _leaves(model, settings.hpo.space, "", problems)]
    searched = [one for one in found if one]
    if not searched and not problems:
        such = "program.NAME, or training.num_epochs" if ":" in settings.recipe.name else "training.learning_rate"
        problems.append(f"hpo.space is empty: expected a setting to vary, such as {such}")
    if not problems:
        searched = _ordered(searched, problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return Space(tuple(searched))


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


def check_trial(settings: Settings) -> None:
    """Check ``hpo.trial``.

    Raises:
        ConfigError: listing every setting in it that is unknown or cannot have its value.
    """
    problems = []
    for name, value in flat(settings.hpo.trial):
        if schema.at(type(settings), name) is None:
            problems.append(f"hpo.trial.{name}: {_unknown(type(settings), name)}")
        elif name.split(".", 1)[0] in ("hpo", "engine", "recipe") or name in ("run.folder", "run.resume"):
            problems.append(f"hpo.trial.{name}: a trial cannot have another one than its search")
        elif wrong := schema.problem(Settings, name, value):
            problems.append(f"hpo.trial.{wrong}")
    if problems:
        raise ConfigError("\n".join(problems))


def _leaves(model: Any, given: Any, prefix: str, problems: list[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Walk to the range of each searched setting; null takes one out."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        has_words = isinstance(value, Mapping) and bool(set(map(str, value)) & set(_WORDS))
        if value is None and schema.at(Settings, name):
            continue
        if schema.at(model, name) is None:
            problems.append(f"hpo.space.{name}: {_unknown(model, name)}")
        elif not isinstance(value, Mapping) or (has_words and _is_group(name)):
            problems.append(f"hpo.space.{name}={value!r}: expected a setting with {{log: [low, high]}} or the like")
        elif is_within(name, NOT_SEARCHED):
            problems.append(f"hpo.space.{name}: this says what the search is, and cannot vary in it")
        elif has_words or not (_is_group(name) or is_within(name, (GROUP,))):
            yield name, value
        else:
            yield from _leaves(model, value, f"{name}.", problems)


def _unknown(model: Any, name: str) -> str:
    own = {f"{GROUP}.{name}"} if GROUP in model.model_fields and "." not in name else ()
    return schema.unknown(model, name, also=own)


def with_hpo(settings: Settings, **changed: Any) -> Settings:
    """Return settings of which those of the search are others."""
    return settings.model_copy(update={"hpo": settings.hpo.model_copy(update=changed)})


def _is_group(name: str) -> bool:
    found = schema.at(Settings, name)
    return found is not None and found.is_group


def _searched(name: str, given: Mapping[str, Any], problems: list[str]) -> Searched | None:
    """Read one setting's own part of the space."""
    label, before = f"hpo.space.{name}", len(problems)
    problems += [f"{label}.{key}: unknown; {schema.nearest(str(key), _WORDS)}" for key in given if key not in _WORDS]
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1 or not isinstance(given[kinds[0]], list | tuple):
        found = ", ".join(f"{kind}={given[kind]!r}" for kind in kinds) or "none"
        problems.append(f"{label}: expected a list under one of {', '.join(KINDS)}, found {found}")
        return None
    kind, values, step = kinds[0], given[kinds[0]], given.get("step")
    types = _kinds(name)
    if kind == "choices":
        plain = all(isinstance(one, str | int | float | bool | None) for one in values)
        if not values or not plain or any(one in values[:place] for place, one in enumerate(values)):
            problems.append(f"{label}.choices={list(values)}: expected different plain values, at least one")
    else:
        problems += _range(label, kind, values, step, whole=int in types and float not in types)
    if len(problems) == before:
        wrong = (schema.problem(Settings, name, value) for value in values)
        problems += [f"{label}.{kind}: {one}" for one in wrong if one]
    when = _conditions(label, given.get("when"), problems)
    if len(problems) > before:
        return None
    decimal = kind == "log" and float in types
    return Searched(name, kind, tuple(map(float, values) if decimal else values), step, when)


def _kinds(name: str) -> tuple[Any, ...]:
    found = schema.at(Settings, name)
    return schema.members(found.kind) if found else ()


def _range(label: str, kind: str, values: Sequence[Any], step: Any, *, whole: bool) -> list[str]:
    """Say why two ends are no range of a setting; ``whole``: it takes integers alone."""
    if whole and kind == "float":
        return [f"{label}.float: it takes an integer: use int, log or choices"]
    fits = int if kind == "int" or whole else int | float
    numbers = (*values, *([] if step is None else [step]))
    if len(values) != 2 or any(isinstance(one, bool) or not isinstance(one, fits) for one in numbers):  # noqa: PLR2004
        return [f"{label}.{kind}={list(values)}: expected two {'integers' if fits is int else 'numbers'}, low and high"]
    low, high = values
    if not low < high or (kind == "log" and low <= 0):
        return [f"{label}.{kind}={list(values)}: expected the lower one first{', above 0' if kind == 'log' else ''}"]
    if step is not None and (kind == "log" or not 0 < step <= high - low):
        return [f"{label}.step={step!r}: expected a number above 0 and within a range of float or int"]
    return []


def _conditions(label: str, when: Any, problems: list[str]) -> dict[str, tuple[Any, ...]]:
    if when is None:
        return {}
    if not isinstance(when, Mapping) or not when:
        problems.append(
            f"{label}.when={when!r}: expected settings with their values, such as {{model.name: minilm-l6}}"
        )
        return {}
    found = {}
    for name, value in when.items():
        allowed = tuple(value) if isinstance(value, list | tuple) else (value,)
        if schema.at(Settings, name) is None:
            problems.append(f"{label}.when.{name}: unknown setting; {schema.nearest(name, schema.names(Settings))}")
            continue
        problems += [f"{label}.when: {wrong}" for one in allowed if (wrong := schema.problem(Settings, name, one))]
        found[str(name)] = allowed
    return found


def _ordered(searched: list[Searched], problems: list[str]) -> list[Searched]:
    """Put each setting behind those that it depends on."""
    names = {one.name for one in searched}
    ordered: list[Searched] = []
    left = list(searched)
    while left:
        done = {one.name for one in ordered}
        ready = [one for one in left if all(name in done or name not in names for name in one.when)]
        if not ready:
            problems.append(f"hpo.space: {' and '.join(one.name for one in left)} depend on one another by when")
            return []
        ordered += ready
        left = [one for one in left if one not in ready]
    return ordered


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


def grid(space: Space, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield every combination of values, those of the last setting by turns first.

    Raises:
        ConfigError: a setting has no end of values.
    """
    for one in space.searched:
        if one.distinct() is None and not (one.kind == "int" and one.step is None):
            raise ConfigError(
                f"hpo.sampler=grid: hpo.space.{one.name} has no end of values: give it choices, a float or int range "
                "with a step, or take another sampler"
            )
    yield from _combined(space.searched, {}, settings)


def _combined(left: Sequence[Searched], chosen: dict[str, Any], settings: Settings) -> Iterator[dict[str, Any]]:
    if not left:
        yield chosen
        return
    one, *others = left
    varies = all(value_of(name, chosen, settings) in allowed for name, allowed in one.when.items())
    for more in ({one.name: value} for value in _every(one)) if varies else ({},):
        yield from _combined(others, {**chosen, **more}, settings)


def _every(one: Searched) -> Sequence[Any]:
    if one.kind == "choices":
        return one.values
    (low, high), step = one.values, one.step or 1
    return [low + place * step for place in range(int((high - low) / step + 1e-9) + 1)]
