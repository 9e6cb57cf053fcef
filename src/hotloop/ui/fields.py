"""Settings as the fields of a form: made of their JSON Schema, and read back from what a person typed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.train import grammar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WORDS = {
    "integer": "an integer", "number": "a number", "boolean": "true or false", "string": "text",
    "array": "a list, [1,2]", "object": "a mapping, {name: value}",
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
    """

    name: str
    about: str
    kinds: frozenset[str]
    choices: tuple[Any, ...]
    words: tuple[Any, ...]
    default: Any

    @property
    def nullable(self) -> bool:
        """Whether it may be left empty."""
        return "null" in self.kinds or None in self.choices

    @property
    def is_number(self) -> bool:
        """Whether it takes numbers and no text of any kind."""
        return bool(self.kinds & {"integer", "number"}) and "string" not in self.kinds

    @property
    def takes(self) -> str:
        """What it may be, in words."""
        kinds = [words for kind, words in _WORDS.items() if kind in self.kinds]
        return ", or ".join([*map(str, self.words), *kinds, *(["empty"] if self.nullable else [])])

    def text(self, value: Any) -> str:
        """Return a value as it stands in the form; null is an empty field."""
        if value is None:
            return ""
        return value if isinstance(value, str) else grammar.written(value)

    def read(self, text: str) -> Any:
        """Return the value that a person typed; one that is no choice is returned as text."""
        bare = text.strip()
        if self.choices:
            return next((one for one in self.choices if self.text(one) == bare), bare)
        if not bare and self.nullable:
            return None
        return text if "string" in self.kinds else grammar.parse(bare)


def fields(schema: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, list[Field]]:
    """Return the fields of each group of settings.

    Args:
        schema: of all settings, as pydantic writes it.
        values: the defaults; what is not in them is as the schema says.
    """
    groups = {
        group: list(_walk(_resolved(given, schema), schema, group, values.get(group)))
        for group, given in schema.get("properties", {}).items()
    }
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
    yield Field(
        name=name,
        about=node.get("description", ""),
        kinds=frozenset(kinds) or frozenset({"string"} if not words else ()),
        choices=tuple(offered) if only else (),
        words=() if only else tuple(words),
        default=node.get("default") if value is ... else value,
    )


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a reference stands for, with what stands beside the reference."""
    while "$ref" in node:
        target: Any = schema
        for part in str(node["$ref"]).removeprefix("#/").split("/"):
            target = target[part]
        node = {**target, **{key: value for key, value in node.items() if key != "$ref"}}
    return node


def override(name: str, value: Any) -> str:
    """Return a setting as it is written on the command line."""
    plain = isinstance(value, str) and grammar.parse(value) == value
    return f"{name}={value if plain else grammar.written(value)}"


def shortened(name: str, most: int = 80) -> str:
    """Return a name, or of a long one its beginning and how long it is."""
    return name if len(name) <= most else f"{name[:20]}\N{HORIZONTAL ELLIPSIS} ({len(name)} characters)"
