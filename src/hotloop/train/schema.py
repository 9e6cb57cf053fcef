"""Models of settings: what each field takes, in words, and all that is wrong with values at once."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, cast, get_args, get_origin

from hotloop.errors import ConfigError
from hotloop.train.optional import require
from hotloop.train.parameters import Search

require("pydantic", "Reading settings")
import pydantic  # noqa: E402 - where it is missing, the line above says how to install it
from pydantic.dataclasses import dataclass  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pydantic.fields import FieldInfo


class Group(pydantic.BaseModel):
    """A group of settings: frozen, without further names, and of finite numbers."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


M = TypeVar("M", bound=Group)
_FEW, _ALL = 12, "`hotloop settings` lists all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a model.

    Args:
        name: dotted, from the outermost model on.
        kind: its type, without annotations.
        annotation: its type as it is checked.
        extras: all that annotations say of it.
    """

    name: str
    kind: Any
    annotation: Any
    extras: tuple[Any, ...] = ()

    @property
    def takes(self) -> str:
        """Its type and its range, as Python writes them: ``int | None, Ge(ge=1)``."""
        name = self.kind.__name__ if isinstance(self.kind, type) else str(self.kind)
        limits = [str(one) for one in self.extras if not isinstance(one, str | Search)]
        return ", ".join([re.sub(r"\b[A-Za-z_]\w*\.", "", name), *limits])

    @property
    def is_group(self) -> bool:
        """Whether it has settings of its own."""
        return is_model(self.kind)


class Problem(NamedTuple):
    """What is wrong with the setting of a dotted name: pydantic's word for it, and the whole of it in a sentence."""

    kind: str
    path: str
    text: str


def build(model: type[M], values: Mapping[str, Any]) -> M:
    """Make the settings of plain values.

    Raises:
        ConfigError: listing every setting that is unknown, missing, of a wrong type or out of its range.
    """
    try:
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(one.text for one in problems(error, model))) from error


def problem(model: Any, path: str, value: Any) -> str:
    """Say why a value cannot be that of the setting at a dotted name; empty where it can."""
    setting = at(model, path)
    assert setting is not None
    try:
        _adapter(model, path).validate_json(json.dumps(value, default=str), strict=True)
    except pydantic.ValidationError as error:
        if setting.is_group:
            return "; ".join(one.text for one in problems(error, setting.kind, f"{path}."))
        return f"{path}={shown(value)}: {_words(error.errors())}"
    return ""


@functools.cache
def _adapter(model: Any, path: str) -> Any:
    setting = at(model, path)
    assert setting is not None
    strict = pydantic.ConfigDict(allow_inf_nan=False)
    return pydantic.TypeAdapter(setting.annotation, config=None if setting.is_group else strict)


def problems(error: Any, model: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield what a validation found, one problem a setting.

    Args:
        error: pydantic's.
        model: what was to be made.
        prefix: stands before each name.
    """
    found: dict[str, list[Any]] = {}
    for one in error.errors():
        found.setdefault(_place(model, one["loc"]), []).append(one)
    for path, errors in found.items():
        first, name = errors[0], f"{prefix}{path}"
        own = first.get("ctx", {}).get("error")
        if isinstance(own, ConfigError):
            text = str(own)
        elif first["type"] == "extra_forbidden":
            text = unknown(model, path, prefix)
        elif own is not None or first["type"] == "missing":
            text = f"{name or 'settings'}: {first['msg']}"
        else:
            text = f"{name}={shown(first['input'])}: {_words(errors)}"
        yield Problem(first["type"], path, text)


def _words(errors: Iterable[Any]) -> str:
    """Join what pydantic says of each member of a union."""
    return " or ".join(dict.fromkeys(one["msg"] for one in errors))


def _place(model: Any, loc: tuple[Any, ...]) -> str:
    """Return the setting that an error is about; its place may go on into a list, or a type of several."""
    path = ""
    for part in loc:
        found = at(model, path) if path else None
        if path and (found is None or not (found.is_group or get_origin(found.kind) is Mapping)):
            break
        path = f"{path}.{part}" if path else str(part)
    return path


def of_recipe(  # noqa: PLR0913, PLR0917 - what there is, what of it, and how it is described
    model: type[M], name: str, has: Callable[[str], bool], usual: M, about: Mapping[str, str], prefix: str = ""
) -> type[M]:
    """Return the model of a recipe's settings: what the recipe does not read is no setting in it, but a constant.

    Args:
        model: all settings that there are.
        name: what the recipe is called in messages.
        has: says of a setting, by its dotted name, whether the recipe reads it.
        usual: the defaults; of a setting that the recipe does not read, the constant.
        about: what each setting is for.
        prefix: stands before the names of a nested model.
    """
    changed: dict[str, Any] = {}
    for field, one in fields(model).items():
        path, value, kind = f"{prefix}{field}", getattr(usual, field), cast("Any", one.annotation)
        if is_model(kind):
            inner: Any = of_recipe(kind, kind.__name__, has, value, about, f"{path}.")
            made = pydantic.Field(default_factory=inner, description=kind.__doc__)
            changed[field] = (inner, made) if inner.model_fields else (ClassVar[Any], None)
        elif has(path):
            changed[field] = (one.rebuild_annotation(), pydantic.Field(default=value, description=about.get(path)))
        else:
            changed[field] = (ClassVar[Any], value)
    made = pydantic.create_model(name, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **changed)
    return cast("type[M]", made)


def trimmed(values: Mapping[str, Any], model: Any, same: Mapping[str, Any] | None = None, prefix: str = "") -> Any:
    """Return values without the settings that a recipe's model lacks and other recipes have.

    Args:
        values: below ``hpo.trial`` and ``hpo.space`` are settings too.
        model: the recipe's.
        same: leave out only what is as it is there.
        prefix: where the values stand.
    """
    kept: dict[str, Any] = {}
    for name, value in values.items():
        path, as_there = f"{prefix}{name}", (same or {}).get(name)
        bare = re.sub(r"^hpo\.(trial|space)\.", "", path)
        if at(model, bare) is None and at(model.__base__, bare) is not None:
            if same is None or value == as_there:
                continue
        elif isinstance(value, Mapping) and value:
            below = None if same is None else as_there if isinstance(as_there, Mapping) else {}
            value = trimmed(value, model, below, f"{path}.")  # noqa: PLW2901 - the same value, less of it
            if not value and bare != path:
                continue
        kept[name] = value
    return kept


def unknown(model: Any, path: str, prefix: str = "", also: Iterable[str] = ()) -> str:
    """Say that there is no setting of a dotted name, and which may be meant; ``also`` names further ones."""
    other = at(getattr(model, "__base__", None), path) is not None  # other recipes have it
    said = f"{model.__name__} has no {prefix}{path}" if other else f"unknown setting {prefix}{path}"
    return f"{said}: {nearest(path, {*names(model), *also}, prefix=prefix)}"


def nearest(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """Return "did you mean" with the nearest known names, or all of them where none is near and they are few."""
    by_leaf = {one.rpartition(".")[2]: one for one in sorted(known, reverse=True)}
    leaf = name.rpartition(".")[2]
    near = [by_leaf[one] for one in difflib.get_close_matches(leaf, by_leaf, n=2, cutoff=0.7)]
    near = list(dict.fromkeys([*near, *difflib.get_close_matches(name, sorted(known), n=2)]))[:3]
    if near:
        return f"did you mean {' or '.join(prefix + one for one in near)}?"
    many = sorted(known)
    return f"expected one of {', '.join(prefix + one for one in many)}" if len(many) <= _FEW else _ALL


def meant(name: str, known: Iterable[str]) -> str:
    """Return which known name may be meant, behind a colon; empty where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {near[0]}?" if near else ""


def is_model(kind: Any) -> bool:
    """Say whether a type is a pydantic model or a dataclass."""
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))


def fields(model: Any) -> dict[str, FieldInfo]:
    """Return the fields of a pydantic model or of a dataclass, as pydantic describes them."""
    if hasattr(model, "model_fields"):
        return dict(model.model_fields)
    frozen = model.__dataclass_params__.frozen
    found: dict[str, FieldInfo] = dataclass(model, frozen=frozen).__pydantic_fields__
    return {name: one for name, one in found.items() if one.init is not False}


def names(model: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings and groups; an open mapping (``compile.components``) is one name."""
    for name, one in fields(model).items():
        yield prefix + name
        if is_model(one.annotation):
            yield from names(one.annotation, f"{prefix}{name}.")


@functools.cache
def at(model: Any, path: str) -> Setting | None:
    """Return the setting or group at a dotted name, through open mappings too; None where there is none."""
    name, _, rest = path.partition(".")
    if is_model(model):
        field = fields(model).get(name)
        found = setting(path, field) if field else None
    elif get_origin(model) is Mapping or model is Any:
        kind = get_args(model)[1] if get_args(model) else Any
        found = Setting(name=path, kind=kind, annotation=kind)
    else:
        found = None
    if not rest or not found:
        return found
    inner = at(found.kind, rest)
    return inner and dataclasses.replace(inner, name=path)


def setting(name: str, field: FieldInfo) -> Setting:
    """Describe a field."""
    extras = list(field.metadata)
    kind = _bare(field.annotation, extras)
    flat = (each for one in extras for each in getattr(one, "metadata", None) or (one,))
    return Setting(name=name, kind=kind, annotation=field.rebuild_annotation(), extras=tuple(flat))


def _bare(kind: Any, extras: list[Any]) -> Any:
    """Return a type without its annotations, of which those of its members too are put to ``extras``."""
    if get_origin(kind) is Annotated:
        extras += kind.__metadata__
        return _bare(kind.__origin__, extras)
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_bare(one, extras) for one in get_args(kind))]  # noqa: UP007 - made of a tuple
    return kind


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def shown(value: Any) -> str:
    """Return a value as messages show it: text in quotes, the rest as it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
