"""The values of overrides, ``a.b=c``: Hydra's grammar, of which one run needs no sweeps and no functions."""

from __future__ import annotations

import re
from typing import Any

_INT = r"(?:0|[1-9](?:_?\d)*)"
_POINT = rf"(?:{_INT}\.|{_INT}?\.\d(?:_?\d)*)"
_INTEGER = re.compile(rf"[+-]?{_INT}")
_FLOAT = re.compile(rf"[+-]?(?:{_POINT}|(?:{_INT}|{_POINT})[eE][+-]?\d(?:_?\d)*|inf|nan)", re.IGNORECASE)
_ESCAPED = r"\\[\\()\[\]{}:=, \t]"
_PLAIN = re.compile(rf"(?:\$\{{[^{{}}]+\}}|{_ESCAPED}|[^,\[\]{{}}()'\"])+")
_KEY = re.compile(rf"(?:{_ESCAPED}|[^,\[\]{{}}()'\":])+")
_QUOTED = re.compile(r"""(['"])((?:\\\\)*|.*?[^\\](?:\\\\)*)\1""", re.DOTALL)
_SPACE = re.compile(r"[ \t]*")
_WORDS = {"null": None, "true": True, "false": False}


def parse(text: str) -> Any:
    """Return the value that a text stands for: ``3``, ``1e-3``, ``null``, ``'quoted'``, ``[1,2]``, ``{a: b}`` or text.

    Raises:
        ValueError: the text cannot be read, or names several values.
    """
    if not text.strip():
        return ""
    value, end = _value(text, 0)
    if text[end : end + 1] == ",":
        raise ValueError("names several values: one run takes one")
    if end < len(text):
        raise ValueError(f"cannot be read from {text[end:]!r} on (quote text that has special signs)")
    return value


def _value(text: str, at: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and the place behind it."""
    at = _skip(text, at)
    if text[at : at + 1] == "[":
        return _items(text, at + 1, "]", lambda at: _value(text, at), list)
    if text[at : at + 1] == "{":
        return _items(text, at + 1, "}", lambda at: _pair(text, at), dict)
    if text[at : at + 1] in ("'", '"'):
        return _quoted(text, at)
    found = _PLAIN.match(text, at)
    if found is None:
        raise ValueError(f"cannot be read from {text[at:]!r} on (quote text that has special signs)")
    return _typed(found[0].strip(" \t")), found.end()


def _items(text: str, at: int, close: str, read: Any, make: Any) -> tuple[Any, int]:
    found: list[Any] = []
    at = _skip(text, at)
    while text[at : at + 1] != close or found:
        one, at = read(at)
        found.append(one)
        at = _skip(text, at)
        if text[at : at + 1] == close:
            break
        if text[at : at + 1] != ",":
            raise ValueError(f"cannot be read: expected , or {close} before {text[at:]!r}")
        at += 1
    return make(found), _skip(text, at + 1)


def _pair(text: str, at: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if text[at : at + 1] in ("'", '"'):
        key, at = _quoted(text, at)
    elif found := _KEY.match(text, at):
        key, at = _unescaped(found[0].strip(" \t")), found.end()
    else:
        raise ValueError(f"cannot be read: expected a name before {text[at:]!r}")
    if text[at : at + 1] != ":":
        raise ValueError(f"cannot be read: expected : behind {key!r}")
    value, at = _value(text, at + 1)
    return (key, value), at


def _quoted(text: str, at: int) -> tuple[str, int]:
    found = _QUOTED.match(text, at)
    if found is None:
        raise ValueError("cannot be read: a quote has no end")
    # A backslash is one of its own, unless a quote comes behind it.
    inner = re.sub(rf"(\\+)({found[1]}|$)", lambda one: one[1][: len(one[1]) // 2] + one[2], found[2])
    return inner, _skip(text, found.end())


def _typed(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else _unescaped(text)


def _unescaped(text: str) -> str:
    return re.sub(_ESCAPED, lambda one: one[0][1], text)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
