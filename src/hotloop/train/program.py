"""A program of the user's own: the parameters of its function are its settings, the group ``program``.

A pydantic model made of the function's signature checks them. A dataclass or a pydantic model that is the only
parameter is that model itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from hotloop.errors import ConfigError
from hotloop.step.workload import checked, load_function
from hotloop.train import schema, signature
from hotloop.train.parameters import Search
from hotloop.train.settings import GROUP, RunSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.step import Workload
    from hotloop.train.settings import Settings

FOLD, FABRIC = "fold", "fabric"
"""The parameters that are no settings: the fold that a run of a cross-validation holds out, and Lightning's Fabric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter(schema.Setting):
    """One setting of a program; its name is that below ``program``.

    Args:
        default: as plain data; unset where ``required``.
        required: it has no default.
        about: what it is for, in the words of the program.
    """

    default: Any
    required: bool
    about: str

    @property
    def search(self) -> Search | None:
        """How a search varies it, where the program says so."""
        return next((each for each in self.extras if isinstance(each, Search)), None)

    def line(self, value: Any = ...) -> str:
        """Return one line about it: its value or else its default, what it may be, and what it is for."""
        shown = "" if value is ... and self.required else f"={_shown(self.default if value is ... else value)}"
        default = "no default" if self.required else f"default {_shown(self.default)}"
        about = f": {self.about}" if self.about else ""
        return f"{GROUP}.{self.name}{shown} ({self.takes}; {default}){about}"


class Program:
    """A function that makes a workload, with what its parameters are.

    Args:
        name: ``FILE.py:function`` or ``module:function``.
        function: what the name stands for.

    Raises:
        ConfigError: a parameter cannot be a setting.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function
        self._signature = signature.of(function)
        hints = signature.hints(name, function, also=(FOLD, FABRIC))
        self.takes_fold, self.takes_fabric = (hints.pop(one, None) is not None for one in (FOLD, FABRIC))
        self.whole = next(iter(hints)) if len(hints) == 1 and schema.is_model(next(iter(hints.values()))) else None
        """The only parameter, where it takes all settings as a dataclass or a pydantic model."""
        docs = signature.documented(inspect.getdoc(hints[self.whole] if self.whole else function) or "")
        try:
            model = hints[self.whole] if self.whole else signature.model(name, function, hints)
            self._made, self._adapter = model, pydantic.TypeAdapter(model)
            self._defaults: dict[str, Any] = self._given_defaults(model)
            self.parameters = tuple(self._parameters(model, self._defaults, docs))
        except (pydantic.errors.PydanticUserError, pydantic.errors.PydanticUndefinedAnnotation) as error:
            raise signature.cannot(name, re.split(r"\. |\n", str(error), maxsplit=1)[0]) from error

    def _given_defaults(self, model: Any) -> dict[str, Any]:
        """Return every default as plain data: nested ones as mappings."""
        if self.whole and (given := self._signature.parameters[self.whole].default) is not inspect.Parameter.empty:
            return dict(self._plain(given))
        return {
            name: self._plain(one.get_default(call_default_factory=True))
            for name, one in schema.fields(model).items()
            if not one.is_required()
        }

    def _plain(self, value: Any) -> Any:
        import pydantic_core  # noqa: PLC0415 - comes with pydantic, whose presence was checked

        try:
            return pydantic_core.to_jsonable_python(value)
        except pydantic_core.PydanticSerializationError as error:
            raise signature.cannot(self.name, str(error)) from error

    def _parameters(
        self, model: Any, defaults: Mapping[str, Any], docs: Mapping[str, str], prefix: str = ""
    ) -> Iterator[Parameter]:
        for name, one in schema.fields(model).items():
            if schema.is_model(one.annotation):
                inner = {**docs, **signature.documented(inspect.getdoc(one.annotation) or "")}
                found = defaults.get(name, {})
                yield from self._parameters(one.annotation, found, inner, f"{prefix}{name}.")
                continue
            setting = schema.setting(prefix + name, one)
            texts = [each for each in setting.extras if isinstance(each, str)]
            yield Parameter(
                **vars(setting),
                default=defaults.get(name),
                required=name not in defaults,
                about=one.description or " ".join(texts) or docs.get(name, ""),
            )

    def about(self) -> list[str]:
        """Return the lines that ``--help`` prints: what the program is, and each of its settings."""
        said = (inspect.getdoc(self.function) or "").split("\n\n", 1)[0].splitlines()
        return [*said, *([one.line() for one in self.parameters] or ["It has none: its function has no parameters."])]

    def of(self, name: str) -> Parameter | None:
        """Return the parameter of a name below ``program``; None where there is none."""
        return next((one for one in self.parameters if one.name == name), None)

    def values(self, values: Mapping[str, Any]) -> Iterator[tuple[Parameter, Any]]:
        """Yield each parameter with its value, None where it has none."""
        for one in self.parameters:
            value: Any = values
            for part in one.name.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            yield one, value

    def filled(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings as plain data: those given, and the defaults of the others.

        Raises:
            ConfigError: listing each setting that is unknown, missing, of a wrong type or out of its range.
        """
        filled: dict[str, Any] = self._adapter.dump_python(self._checked(values), mode="json")
        return filled

    def make(self, values: Mapping[str, Any], fold: Any = None, fabric: Any = None) -> Workload:
        """Make the workload of some settings.

        Raises:
            ConfigError: as `filled`, or the function returns no `Workload`.
        """
        return checked(self.name, self.call(values, fold, fabric))

    def call(self, values: Mapping[str, Any], fold: Any = None, fabric: Any = None) -> Any:
        """Call the function with some settings, and return what it returns.

        Raises:
            ConfigError: as `filled`.
        """
        model = self._checked(values)
        given = {self.whole: model} if self.whole else {one: getattr(model, one) for one in schema.fields(type(model))}
        if self.takes_fold and fold is not None:
            given[FOLD] = fold
        if self.takes_fabric and fabric is not None:
            given[FABRIC] = fabric
        bound = inspect.BoundArguments(self._signature, OrderedDict(given))
        return self.function(*bound.args, **bound.kwargs)

    def problems(self, values: Mapping[str, Any], *, complete: bool = False) -> list[str]:
        """Say all that is wrong with settings, each by its dotted name.

        Args:
            values: the settings.
            complete: say also which are not set and have no default.
        """
        unknown = list(self._unknown(values))
        wrong = [f"unknown setting {GROUP}.{name}: {self.nearest(name)}" for name in unknown]
        refused = (one for one in self._refused(values) if one.path not in unknown)
        return wrong + [one.text for one in refused if complete or one.kind != "missing"]

    def nearest(self, name: str) -> str:
        """Say which setting may be meant by a name that none has."""
        return schema.nearest(name, [one.name for one in self.parameters], prefix=f"{GROUP}.")

    def json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the settings."""
        return {**self._adapter.json_schema(), "additionalProperties": False}

    def _checked(self, values: Mapping[str, Any]) -> Any:
        if wrong := self.problems(values, complete=True):
            raise ConfigError("\n".join(wrong))
        return self._adapter.validate_json(json.dumps(self._merged(self._defaults, values)), strict=True)

    def _merged(self, defaults: Mapping[str, Any], values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """Put values on top of defaults; of a nested group, each value on its own."""
        merged = dict(defaults)
        for name, value in values.items():
            within = self._is_group(f"{prefix}{name}") and isinstance(value, dict)
            merged[name] = self._merged(merged.get(name, {}), value, f"{prefix}{name}.") if within else value
        return merged

    def _unknown(self, values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for name, value in values.items():
            path = f"{prefix}{name}"
            if self.of(path) is None and self._is_group(path) and isinstance(value, dict):
                yield from self._unknown(value, f"{path}.")
            elif self.of(path) is None:
                yield path

    def _is_group(self, path: str) -> bool:
        return any(one.name.startswith(f"{path}.") for one in self.parameters)

    def _refused(self, values: Mapping[str, Any]) -> Iterator[schema.Problem]:
        """Yield what the model refuses."""
        try:
            self._adapter.validate_json(json.dumps(self._merged(self._defaults, values)), strict=True)
        except pydantic.ValidationError as error:
            yield from schema.problems(error, self._made, f"{GROUP}.")


def load(name: str) -> Program:
    """Run the file of a program, as an import would, and return it.

    Raises:
        ConfigError: there is no such file or function, or its parameters cannot be settings.
    """
    return Program(name, load_function(name))


def known(name: str) -> Program:
    """Return a program as its file is now, for its settings; what it prints as it is read is for its run to print."""
    place = Path(name.rpartition(":")[0])
    return _known(name, place.stat().st_mtime_ns if place.is_file() else 0)


@functools.lru_cache(maxsize=8)
def _known(name: str, changed: int) -> Program:  # noqa: ARG001 - a changed file is read again
    with contextlib.redirect_stdout(io.StringIO()):
        return load(name)


@contextlib.contextmanager
def as_trained(name: str) -> Iterator[None]:
    """Say of what does not fit a run that its program has changed since.

    Raises:
        ConfigError: an error of the block, with what to do.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(
            f"{name} has changed since this run; put it back as it was, or start a new run: {error}"
        ) from error


def filled(settings: Settings) -> Settings:
    """Return settings with all of their program's own, checked; those of a recipe as they are.

    Raises:
        ConfigError: as `Program.filled`, or a cross-validation of a program that knows no folds.
    """
    if ":" not in settings.recipe.name:
        return settings
    program = known(settings.recipe.name)
    if settings.kfold.n_splits is not None and not program.takes_fold:
        raise ConfigError(
            f"recipe={settings.recipe.name} cannot be cross-validated: its function takes no fold. Give it "
            "the parameter `*, fold: hotloop.Fold | None = None`, and split its rows by fold.split(n)"
        )
    names = () if program.takes_fabric else ("devices", "accelerator", "precision")
    for name in (one for one in names if getattr(settings.run, one) != RunSettings.model_fields[one].default):
        raise ConfigError(
            f"run.{name}={getattr(settings.run, name)}: the function of recipe={settings.recipe.name} takes no fabric. "
            f"Give it the parameter `*, fabric: Fabric | None = None`, or leave run.{name} out"
        )
    return settings.model_copy(update={GROUP: program.filled(settings.program)})


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
