"""The space of a search: which settings vary and how, checked against the settings themselves before a trial begins."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import schema
from hotloop.train.settings import GROUP, Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import optuna

KINDS = ("log", "float", "int", "choices")
_WORDS = (*KINDS, "step", "when")
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
    "language",
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

    def is_whole(self, values: Mapping[str, Any], settings: Settings) -> bool:
        """Return whether values are all that a trial varies: a worker may die while it draws them one by one."""
        chosen: dict[str, Any] = {}
        for one in self.searched:
            if all(value_of(name, chosen, settings) in allowed for name, allowed in one.when.items()):
                if one.name not in values:
                    return False
                chosen[one.name] = values[one.name]
        return True

    @property
    def compiled(self) -> tuple[Searched, ...]:
        """The searched settings of which each value is compiled anew."""
        return tuple(one for one in self.searched if one.changes_code)


def override(name: str, value: Any) -> str:
    """Return a value as an override in the grammar of the command line, which gives exactly this value back."""
    return f"{name}={_text(value)}"


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
    """Walk to what stands under each setting's name; null takes one out."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        if value is None and schema.at(Settings, name):
            continue
        if schema.at(model, name) is None:
            problems.append(f"hpo.space.{name}: {_unknown(model, name)}")
        elif not isinstance(value, Mapping):
            problems.append(
                f"hpo.space.{name}={value!r}: expected {{log: [low, high]}}, {{choices: [...]}} or the like"
                f"{schema.meant(str(key), _WORDS)}"
            )
        elif is_within(name, NOT_SEARCHED):
            problems.append(f"hpo.space.{name}: this says what the search is, and cannot vary in it")
        elif name == GROUP or (is_within(name, (GROUP,)) and not set(map(str, value)) & set(_WORDS)):
            yield from _leaves(model, value, f"{name}.", problems)
        elif not _is_group(name):
            yield name, value
        elif set(map(str, value)) & set(_WORDS):
            problems.append(f"hpo.space.{name}: a group of settings; expected one of them, such as {_first(name)}")
        else:
            yield from _leaves(model, value, f"{name}.", problems)


def _unknown(model: Any, name: str) -> str:
    """Say what may be meant by an unknown name: a program's setting, too, without its group."""
    own = {f"{GROUP}.{name}"} if GROUP in model.model_fields and "." not in name else ()
    return schema.unknown(model, name, also=own)


def with_hpo(settings: Settings, **changed: Any) -> Settings:
    """Return settings of which those of the search are others."""
    return settings.model_copy(update={"hpo": settings.hpo.model_copy(update=changed)})


def _is_group(name: str) -> bool:
    found = schema.at(Settings, name)
    return found is not None and found.is_group


def _first(name: str) -> str:
    found = schema.at(Settings, name)
    assert found is not None
    return f"{name}.{next(iter(schema.fields(found.kind)))}"


def _searched(name: str, given: Mapping[str, Any], problems: list[str]) -> Searched | None:
    """Read one setting's own part of the space."""
    before = len(problems)
    label = f"hpo.space.{name}"
    problems += [f"{label}.{key}: unknown; {schema.nearest(str(key), _WORDS)}" for key in given if key not in _WORDS]
    kinds = [kind for kind in KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        more = "; ".join(f"{label}.{kind}=null takes {kind} out" for kind in kinds)
        problems.append(
            f"{label}: expected one of {', '.join(KINDS)}, found {', '.join(kinds) or 'none'}. {more}".strip()
        )
        return None
    kind = kinds[0]
    values = given[kind]
    if not isinstance(values, Sequence) or isinstance(values, str):
        problems.append(f"{label}.{kind}={values!r}: expected a list")
        return None
    problems += (_choices if kind == "choices" else _range)(label, name, kind, values)
    if len(problems) == before:
        problems += _step(label, kind, values, given.get("step"))
    when = _conditions(label, given.get("when"), problems)
    if len(problems) > before:
        return None
    decimal = kind == "log" and float in _kinds(name)
    return Searched(name, kind, tuple(map(float, values) if decimal else values), given.get("step"), when)


def _kinds(name: str) -> tuple[Any, ...]:
    found = schema.at(Settings, name)
    return schema.members(found.kind) if found else ()


def _choices(label: str, name: str, kind: str, values: Sequence[Any]) -> list[str]:
    found = [f"{label}.{kind}: expected at least one choice"] if not values else []
    if any(value in values[:place] for place, value in enumerate(values)):
        found.append(f"{label}.{kind}={list(values)}: a choice stands there twice")
    for value in values:
        if not isinstance(value, str | int | float | bool | None):
            found.append(f"{label}.{kind}: {value!r} is no plain value: expected text, a number, true, false or null")
        elif wrong := schema.problem(Settings, name, value):
            found.append(f"{label}.{kind}: {wrong}")
    return found


def _range(label: str, name: str, kind: str, values: Sequence[Any]) -> list[str]:
    kinds = _kinds(name)
    whole = kind == "int" or (kind == "log" and int in kinds and float not in kinds)
    wanted = "two integers" if whole else "two numbers"
    fits = int if whole else int | float
    if len(values) != 2 or any(isinstance(one, bool) or not isinstance(one, fits) for one in values):  # noqa: PLR2004
        return [f"{label}.{kind}={list(values)}: expected {wanted}, low and high"]
    low, high = values
    if not low < high:
        return [f"{label}.{kind}={list(values)}: expected the lower one first"]
    if kind == "log" and low <= 0:
        return [f"{label}.log={list(values)}: a logarithm needs numbers above 0; use float"]
    if not whole and float not in kinds and int in kinds:
        return [f"{label}.{kind}: {name} takes an integer: use int, log or choices"]
    wrong = [schema.problem(Settings, name, value) for value in values]
    return [f"{label}.{kind}: {one}" for one in wrong if one]


def _step(label: str, kind: str, values: Sequence[Any], step: Any) -> list[str]:
    if step is None:
        return []
    if kind not in ("float", "int"):
        return [f"{label}.step={step!r}: goes with float and int, not with {kind}"]
    fits = int if kind == "int" else int | float
    wanted = "an integer" if kind == "int" else "a number"
    if isinstance(step, bool) or not isinstance(step, fits) or not 0 < step <= values[1] - values[0]:
        return [f"{label}.step={step!r}: expected {wanted} above 0 and within the range"]
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


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        # A backslash is one of its own, unless a quote comes behind it.
        return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value) + "'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(one)}" for key, one in value.items()) + "}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list | tuple) else repr(value)
