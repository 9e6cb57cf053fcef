"""What a failed guard means: torch's text, of 2.11 to 2.15, as a cause, what it is about, and its values."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.events import Recompiled

LEFT_BEHIND = re.compile(r"___stack\d+|___context_manager")
"""Names of the values that a graph break leaves to the code behind it."""


@dataclasses.dataclass(frozen=True)
class Guard:
    """A failed guard.

    Args:
        cause: why the code did not fit, as rule ``recompile`` names it in the catalogue. ``size`` stands for every
            change of a size, since only further guards show which kind of change it is; ``break_value`` for a value
            that a graph break left behind.
        subject: what it is about, as the program's author would write it: ``drop.p``, ``x``; a setting of torch's.
        values: what was expected and what came, as far as the text holds them.
        dim: the dimension, for a size.
    """

    cause: str
    subject: str = ""
    values: tuple[str, ...] = ()
    dim: int | None = None


_TENSOR = (
    r"^tensor '(?P<subject>.+)' (?P<what>[a-z_ ]+) mismatch(?: at index (?P<dim>\d+))?"
    r"(?:\. expected (?P<before>.+?))?(?:, actual (?P<after>.+))?$"
)
_FORMS = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        ("setting", r"^GLOBAL_STATE changed: (?P<subject>.+)$"),
        ("tensor", _TENSOR),
        ("length", r"^(?:not )?len\((?P<subject>.+?)\) (?:==|!=|<|>|<=|>=) (?P<before>\d+)$"),
        ("new_object", r"^(?:not )?___dict_contains\((['\"])(?P<name>\w+)\1, (?P<subject>.+)\.__dict__\)$"),
        ("value", r"^(?P<subject>\S+) is (?P<before>None|not None)$"),
        (
            "new_object",
            r"^(?:___check_(?:type_id|obj_id|current_backend|torch_function_mode_stack)|id|type)\((?P<subject>[^,)]+)",
        ),
        # torch compiles a dimension of size 1 apart: this guard says that 2 or more were expected, and 1 came.
        ("one", r"^2 <= (?P<subject>[^<>]+?)\.size\(\)\[(?P<dim>\d+)\]$"),
        ("size_relation", r"^(?P<subject>(?:Eq|Ne|Mod)\(.*|.*(?:\.(?:size|stride)\(\)|\bsize\(|[<>]| % ).*)$"),
        ("value", r"^(?P<subject>[^=!<>]+?) == (?P<before>.+)$"),
        ("length", r"^(?:not )?(?P<subject>[A-Za-z_][\w.\[\]'\"]*)$"),
    )
)
"""The forms of torch's texts; the first that fits is read."""


def guard_of(event: Recompiled) -> Guard:
    """Read the failed guard of a recompile."""
    # torch 2.11 makes a float an input of the code after it changed once, and reads it back as a tensor's item.
    text = re.sub(r"___as_tensor\(([^()]+)\)\.item\(\)", r"\1", event.reason.strip())
    text = re.sub(r"\.__dict__\[(['\"])(.+?)\1\]", r".\2", text)
    if LEFT_BEHIND.search(text):
        return Guard("break_value", text)
    for cause, pattern in _FORMS:
        if match := pattern.match(text):
            return _read(cause, match)
    return Guard("other", text)


def _read(cause: str, found: re.Match[str]) -> Guard:
    """Return the guard of a form that fits."""
    parts = found.groupdict()
    raw, subject = parts["subject"], _name(parts["subject"])
    values = tuple(value for value in (parts.get("before"), parts.get("after")) if value)
    dim = int(parts["dim"]) if parts.get("dim") else None
    match cause:
        case "tensor":
            return _of_tensor(raw, parts["what"], values, dim)
        case "one":
            return Guard("size", subject, ("2 or more", "1"), dim)
        case "length":
            return _of_length(raw, values)
        case "value":
            mode = subject.rpartition(".")[2] == "training"
            return Guard("train_eval" if mode else "arguments" if _is_argument(raw) else "attribute", subject, values)
        case "new_object":
            return Guard(cause, f"{subject}.{parts['name']}" if parts.get("name") else subject)
        case _:
            return Guard(cause, raw)


def _of_tensor(raw: str, what: str, values: tuple[str, ...], dim: int | None) -> Guard:
    if "_parameters[" in raw and what in ("size", "rank", "stride", "dtype"):
        return Guard("new_object", _name(raw))  # a parameter does not change its size or dtype: it was replaced
    if what == "size":
        return Guard("size", _name(raw), values, dim)
    shown = "the device or gradient mode" if what == "dispatch key set" else f"the {what}"
    # A set of dispatch keys is shown by its first key, which names the device.
    short = tuple(value.removeprefix("DispatchKeySet(").split(",")[0].rstrip(")") for value in values)
    return Guard("input", f"{shown} of {_name(raw)}", short)


def _of_length(raw: str, values: tuple[str, ...]) -> Guard:
    place = re.search(r"(?:^|\.)_(?:modules|(?:forward|backward)(?:_pre)?_hooks)$", raw)
    if place is not None:
        of_module = _name(raw[: place.start()]).removeprefix("module") or "the model"
        return Guard("growth", f"the modules or hooks of {of_module}")
    return Guard("arguments" if _is_argument(raw) else "growth", _name(raw), values)


def _name(text: str) -> str:
    """Return what a guard is about without torch's way to reach it: ``module._modules['drop'].p`` is ``drop.p``."""
    shown = re.sub(r"^L\[(['\"])(.+?)\1\]", r"\2", text.strip())
    shown = re.sub(r"^G\[['\"]__import_.+?['\"]\]\.", "", shown)
    shown = re.sub(r"^G\[['\"](.+?)['\"]\]", r"\1", shown)
    shown = re.sub(r"\bkwargs\[['\"](\w+)['\"]\]", r"\1", shown)
    shown = re.sub(r"\._(?:modules|parameters|buffers)\[(['\"])(.+?)\1\]", r".\2", shown)
    return shown.removeprefix("module.")


def _is_argument(text: str) -> bool:
    """Return whether a guard is on an argument of the call or something in it, not on the module or a global."""
    return "." not in text and not text.strip().startswith("G[")
