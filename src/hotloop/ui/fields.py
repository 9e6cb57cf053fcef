"""Settings as the fields of a form: made of their JSON Schema, and read back from what a person typed."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from hotloop.train import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PLAIN = re.compile(r"[A-Za-z_/.~@+-][\w/.@+-]*(?: [\w/.@+-]+)*", re.ASCII)
_APART = r",'\u2019 \u00a0\u202f"
COMMA = re.compile(rf"\s*[-+]?(?:\d[\d.]*[{_APART}](?=\d)[\d.{_APART}]*|\d+\.\d+\.[\d.{_APART}]*)\s*")
"""A number in the format of a country: 0,001 or 1.000,5 or 1,000.5 or 1'000 or 1 000 or 1.000.000."""
_NULL = re.compile(r"(\. |)\bnull\b")
_WORDS = {"integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text"}
_WORDS |= {"array": "a list, [1,2]", "object": "a mapping, {name: value}"}
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "string": (str,), "array": (list,),
    "object": (dict,),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting.

    Args:
        name: dotted.
        about: what it is for.
        kinds: the JSON types that it takes.
        choices: its values, where it takes no others; null is among them as None.
        words: words that it takes beside numbers, such as ``auto``.
        default: its value where nobody says otherwise.
        limits: its range, in JSON Schema's words.
        search: how a search varies it where nobody says otherwise, as a program declares it.
    """

    name: str
    about: str
    kinds: frozenset[str]
    choices: tuple[Any, ...]
    words: tuple[Any, ...]
    default: Any
    limits: Mapping[str, Any]
    search: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def nullable(self) -> bool:
        """Whether it may be left empty."""
        return "null" in self.kinds or None in self.choices

    @property
    def is_number(self) -> bool:
        """Whether it takes numbers and no text of any kind."""
        return bool(self.kinds & {"integer", "number"}) and "string" not in self.kinds

    @property
    def help(self) -> str:
        """What it is for, in the words of the form, where null is an empty field or a choice that is not set."""
        word = "not set" if self.choices else "empty"
        said = _NULL.sub(lambda found: found[1] + (word.capitalize() if found[1] else word), self.about)
        return said if self.nullable else self.about

    @property
    def takes(self) -> str:
        """What it may be, in words."""
        order = [kind for kind in _WORDS if kind in self.kinds]
        kinds = [_WORDS[kind] + (self._range() if kind in ("integer", "number") else "") for kind in order]
        words = [*map(_shown, self.words), *kinds]
        return ", or ".join([*words, *(["empty"] if self.nullable else [])])

    def _range(self) -> str:
        names = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
        found = [f"{word} {self.limits[name]}" for name, word in names.items() if name in self.limits]
        return f" {' and '.join(found)}" if found else ""

    def text(self, value: Any) -> str:
        """Return a value as it stands in the form; null is an empty field."""
        if value is None:
            return ""
        return value if isinstance(value, str) else to_text(value)

    def read(self, text: str) -> Any:
        """Return the value that a person typed.

        Raises:
            ValueError: it cannot be read, with what was expected.
        """
        bare = text.strip()
        if self.choices:
            return next(one for one in self.choices if _shown(one) == bare or (one is None and not bare))
        if not bare and self.nullable:
            return None
        if "string" in self.kinds:
            return text if bare or not self.words else bare
        if self.is_number and COMMA.fullmatch(bare):
            raise ValueError(f"{self.name}={bare}: write numbers with a point and without separators, such as 0.001")
        try:
            return grammar.parse(bare)
        except ValueError as error:
            raise ValueError(f"{self.name}={bare}: {error}; expected {self.takes}") from error

    def wrong(self, value: Any) -> str:
        """Say why a value cannot be this setting's, by its types and range; empty where it can."""
        fits = [kind for kind in self.kinds if isinstance(value, _TYPES.get(kind, ()))]
        fits = [kind for kind in fits if kind == "boolean" or not isinstance(value, bool)]
        if value in self.choices or value in self.words or (value is None and self.nullable):
            return ""
        inside = all(
            {"minimum": value >= end, "exclusiveMinimum": value > end, "maximum": value <= end}.get(name, value < end)
            for name, end in self.limits.items()
        ) if isinstance(value, int | float) else True  # fmt: skip
        return "" if fits and inside and not self.choices else f"{self.name}={to_text(value)}: expected {self.takes}"


def fields(schema: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[Field]]:
    """Return the fields of each group of settings.

    Args:
        schema: of all settings, as pydantic writes it.
        values: the defaults; what is not in them is as the schema says.
    """
    groups: dict[str, list[Field]] = {}
    for group, given in schema.get("properties", {}).items():
        groups[group] = list(_walk(_resolved(given, schema), schema, group, values.get(group)))
    return {group: found for group, found in groups.items() if found}


def _walk(node: Mapping[str, Any], schema: Mapping[str, Any], name: str, value: Any) -> Iterator[Field]:
    if node.get("properties"):
        for key, one in node["properties"].items():
            inner = value.get(key, ...) if isinstance(value, dict) else ...
            yield from _walk(_resolved(one, schema), schema, f"{name}.{key}", inner)
        return
    members = [_resolved(one, schema) for one in node.get("anyOf", [node])]
    kinds = {str(one["type"]) for one in members if "type" in one and "enum" not in one and "const" not in one}
    words = [each for one in members for each in one.get("enum", [one["const"]] if "const" in one else [])]
    only = not kinds - {"null", "boolean"} and (words or "boolean" in kinds)
    offered = [*([None] if "null" in kinds else []), *([False, True] if "boolean" in kinds else []), *words]
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    yield Field(
        name=name,
        about=node.get("description", ""),
        kinds=frozenset(kinds) or frozenset({"string"} if not words else ()),
        choices=tuple(offered) if only else (),
        words=() if only else tuple(words),
        default=node.get("default") if value is ... else value,
        limits={key: one[key] for one in members for key in limits if key in one},
        search=node.get("search", {}),
    )


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a reference stands for, with what stands beside the reference."""
    while "$ref" in node:
        target: Any = schema
        for part in str(node["$ref"]).removeprefix("#/").split("/"):
            target = target[part]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def to_text(value: Any) -> str:
    """Return a value as it is written behind ``name=`` on the command line; `grammar.parse` reads the same back."""
    if value is None or isinstance(value, bool):
        return _shown(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(str(key))}:{to_text(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(to_text, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def shortened(name: str, most: int = 80) -> str:
    """Return a name, or of a long one its beginning and how long it is."""
    return name if len(name) <= most else f"{name[:20]}\N{HORIZONTAL ELLIPSIS} ({len(name)} characters)"


def _quoted(text: str) -> str:
    """Quote text where it would be read as something else."""
    if _PLAIN.fullmatch(text):
        try:
            if grammar.parse(text) == text:
                return text
        except ValueError:
            pass
    # A backslash is one of its own, unless a quote comes behind it.
    return "'" + re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text) + "'"


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
