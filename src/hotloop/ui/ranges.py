"""The ranges of a search as rows of a form: made of ``hpo.space``, and read back from what a person typed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import grammar
from hotloop.train.nested import nested
from hotloop.train.search import space
from hotloop.train.settings import GROUP
from hotloop.ui.fields import COMMA, to_text

if TYPE_CHECKING:
    from hotloop.train.settings import Settings
    from hotloop.ui.fields import Field

SPACE = "hpo.space"
ROWS = "range.rows"
"""The field of the form that numbers the rows that there are."""
KINDS = {"float": "range", "log": "log range", "int": "whole numbers", "choices": "choices"}
AS_WRITTEN = "as written"
"""The kind of a row that a file says in a way that no other kind has."""
PARTS = ("setting", "kind", "low", "high", "step", "choices", "when")
_WORDS = (*space.KINDS, "step", "when")
_BETWEEN = re.compile(r"\d,\d")
_ENDS = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """A range as it stands in the form, all of it as text."""

    number: str
    setting: str = ""
    kind: str = "float"
    low: str = ""
    high: str = ""
    step: str = ""
    choices: str = ""
    when: str = ""

    @property
    def slot(self) -> str:
        """The name of the place where its mistakes stand."""
        return f"range.{self.number}"

    @property
    def is_blank(self) -> bool:
        """Whether nobody has typed anything into it yet."""
        return not any((self.setting, self.low, self.high, self.step, self.choices, self.when))


def searchable(names: list[str]) -> list[str]:
    """Return the settings that a search may vary."""
    return [one for one in names if not space.is_within(one, space.NOT_SEARCHED)]


def of(given: Mapping[str, Any], fields: Mapping[str, Field]) -> list[Row]:
    """Return the rows that stand for a space."""
    return [_row(str(number), name, leaf, fields.get(name)) for number, (name, leaf) in enumerate(leaves(given))]


def leaves(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting of a space with how it varies; what null takes out is left out."""
    for key, value in given.items():
        name = f"{prefix}{key}"
        is_one = "." in name and isinstance(value, Mapping) and set(map(str, value)) & set(_WORDS)
        if isinstance(value, Mapping) and value and not is_one:
            yield from leaves(value, f"{name}.")
        elif value is not None:
            plain = {word: one for word, one in value.items() if one is not None} if is_one else value
            yield name, plain


def typed(form: Mapping[str, str]) -> list[Row]:
    """Return the rows as a person left them."""
    numbers = [one for one in form.get(ROWS, "").split(",") if re.fullmatch(r"\d{1,4}", one, re.ASCII)]
    return [
        Row(one, *(form.get(f"range.{one}.{part}", "").strip() for part in PARTS)) for one in dict.fromkeys(numbers)
    ]


def read(rows: list[Row], fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return how each setting varies, by its name, and what is wrong, by the slot of its row."""
    found: dict[str, Any] = {}
    errors = {}
    for row in rows:
        if row.is_blank:
            continue
        if row.setting in found:
            errors[row.slot] = f"{row.setting} has a range above: take one of the two out"
            continue
        try:
            found[row.setting] = _leaf(row, fields.get(row.setting))
        except ValueError as error:
            errors[row.slot] = str(error)
    return found, errors


def wrong(row: Row, leaf: Any, settings: Settings, field: Field | None) -> str:
    """Say why a setting cannot vary so; empty where it can. A condition on another one is not followed."""
    own = leaf if isinstance(leaf, dict) else {}
    if field is not None and row.setting.startswith(f"{GROUP}."):
        values: list[Any] = next((own[kind] for kind in space.KINDS if isinstance(own.get(kind), list)), [])
        if said := next((text for value in values if (text := field.wrong(value))), ""):
            return said
    try:
        space.parse(space.with_hpo(settings, space=nested({row.setting: leaf})))
    except ConfigError as error:
        said = str(error).replace(f"hpo.space.{row.setting}.", "").replace(f"hpo.space.{row.setting}", row.setting)
        return said.replace("use int, log or choices", "choose range, log range or choices").replace(
            "use float", "choose range"
        )
    return ""


def _row(number: str, name: str, leaf: Any, field: Field | None) -> Row:
    kinds = [kind for kind in space.KINDS if isinstance(leaf, Mapping) and isinstance(leaf.get(kind), list | tuple)]
    strange = len(kinds) != 1 or set(leaf) - {*_WORDS}
    if strange or (kinds[0] != "choices" and len(leaf[kinds[0]]) != _ENDS):
        return Row(number, name, AS_WRITTEN, choices=to_text(leaf))
    kind, values = kinds[0], leaf[kinds[0]]
    more = {part: to_text(leaf[part]) for part in ("step", "when") if part in leaf}
    if kind == "choices":
        return Row(number, name, kind, choices=", ".join(map(to_text, values)), **more)
    low, high = map(to_text, values)
    return Row(number, name, "float" if kind == "int" and _is_whole(field) else kind, low, high, **more)


def _is_whole(field: Field | None) -> bool:
    """Return whether a setting takes whole numbers alone: its range is one of them."""
    return field is not None and "integer" in field.kinds and "number" not in field.kinds


def _leaf(row: Row, field: Field | None) -> Any:
    """Return what stands below the setting's name in ``hpo.space``.

    Raises:
        ValueError: something in the row cannot be read.
    """
    if not row.setting:
        raise ValueError("choose the setting that varies")
    if row.kind == AS_WRITTEN:
        return _parsed("values", row.choices)
    if row.kind not in KINDS:
        raise ValueError(f"kind={row.kind}: expected one of {', '.join(KINDS.values())}")
    when = {"when": _parsed("only while", row.when)} if row.when else {}
    if row.kind == "choices":
        return {"choices": _choices(row.choices), **when}
    kind = "int" if row.kind == "float" and _is_whole(field) else row.kind
    step = {"step": _number("step", row.step)} if row.step and kind != "log" else {}
    return {kind: [_number("low", row.low), _number("high", row.high)], **step, **when}


def _number(label: str, text: str) -> Any:
    if COMMA.fullmatch(text):
        raise ValueError(f"{label}={text}: write numbers with a point and without separators, such as 0.001")
    value = _parsed(label, text) if text else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError(f"{label}{f'={text}' if text else ''}: expected a number")


def _parsed(label: str, text: str, written: str = "") -> Any:
    """Read a part of a row; what cannot be read is said with the part's name and what was typed."""
    try:
        return grammar.parse(written or text)
    except ValueError as error:
        raise ValueError(f"{label}={text}: {error}") from error


def _choices(text: str) -> list[Any]:
    if _BETWEEN.search(text):
        raise ValueError(f"values={text}: put a space behind each comma, 1, 2, and write numbers with a point, 0.001")
    found = _parsed("values", text, f"[{text}]")
    if not found:
        raise ValueError("values: expected what is to be tried, such as 16, 32")
    return list(found)
