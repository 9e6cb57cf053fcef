"""What a failed guard means: torch's text, of 2.11 to 2.13, as a cause, what it is about, and its values."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.events import Recompiled


@dataclasses.dataclass(frozen=True)
class Guard:
    """A failed guard.

    Args:
        cause: why the code did not fit, by the names of rule ``recompile`` in the catalogue; ``size`` before it is
            known which of them, and ``break_value`` for what a graph break left behind.
        subject: what it is about, as the program's author would write it: ``drop.p``, ``x``; empty for global settings.
        values: what was expected and what came, as far as the text tells.
        dim: the dimension, for a size.
    """

    cause: str
    subject: str = ""
    values: tuple[str, ...] = ()
    dim: int | None = None


_TENSOR = re.compile(
    r"^tensor '(?P<subject>.+)' (?P<what>size|stride|dtype|rank|device|requires_grad|dispatch key set) mismatch"
    r"(?: at index (?P<dim>\d+))?(?:\. expected (?P<before>.+?))?(?:, actual (?P<after>.+))?$"
)
_GLOBAL = re.compile(r"^GLOBAL_STATE changed: (?P<what>.+)$")
LEFT_BEHIND = re.compile(r"___stack\d+|___context_manager")
"""What a graph break leaves to the code behind it."""
_AS_TENSOR = re.compile(r"___as_tensor\((?P<subject>[^()]+)\)\.item\(\)")
"""A float that torch 2.11 has made an input of the code, after it changed once."""
_EQUAL = re.compile(r"^(?P<subject>[^=!<>]+?) == (?P<value>.+)$")
_LENGTH = re.compile(r"^(?:not )?len\((?P<subject>.+?)\) (?:==|!=|<|>|<=|>=) (?P<value>\d+)$")
_TRUTH = re.compile(r"^(?:not )?(?P<subject>[A-Za-z_][\w.\[\]'\"]*)$")
_OBJECT = re.compile(
    r"^(?:___check_(?:type_id|obj_id|current_backend|torch_function_mode_stack)\(|(?:id|type)\()(?P<subject>[^,)]+)"
)
_NONE = re.compile(r"^(?P<subject>\S+) is (?:not )?None$")
_OWN = re.compile(r"^(?:not )?___dict_contains\((?P<quote>['\"])(?P<name>\w+)(?P=quote), (?P<subject>.+)\.__dict__\)$")
"""Whether an object has something in the place of what its class has."""
_SIZES = re.compile(r"\.(?:size|stride)\(\)|\bsize\(|^(?:Eq|Ne|Mod)\(|(?:^|[^=])[<>]=?| % ")
_SIZE_ONE = re.compile(r"^2 <= (?P<subject>[^<>]+?)\.size\(\)\[(?P<dim>\d+)\]$")
_IN_DICT = re.compile(r"\.__dict__\[(?P<quote>['\"])(?P<name>.+?)(?P=quote)\]")
_INSIDE = re.compile(r"(?:^|\.)_(?:modules|(?:forward|backward)(?:_pre)?_hooks)$")
"""Where a module keeps the modules inside of it, and its hooks."""
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\[(?P<quote>['\"])(?P<name>.+?)(?P=quote)\]")
_KEYWORD = re.compile(r"\bkwargs\[['\"](?P<name>\w+)['\"]\]")
_LOCAL = re.compile(r"^L\[(?P<quote>['\"])(?P<name>.+?)(?P=quote)\]")
_MODULE_GLOBAL = re.compile(r"^G\[['\"]__import_.+?['\"]\]\.")
_PLAIN_GLOBAL = re.compile(r"^G\[['\"](?P<name>.+?)['\"]\]")
_INTEGER = re.compile(r"^-?\d+$")
_FLOAT = re.compile(r"^-?(?:\d+\.\d*(?:e-?\d+)?|\d+e-?\d+|nan|inf)$")
_GLOBAL_CAUSES = (
    ("grad_mode", "grad_mode", ""),
    ("inference_mode", "grad_mode", ""),
    ("num_threads", "threads", ""),
    ("autocast", "precision", "autocast"),
    ("default_dtype", "precision", "the default dtype"),
)
_TENSOR_CAUSES = {
    "size": "size",
    "stride": "strides",
    "dtype": "precision",
    "rank": "rank",
    "device": "device",
    "requires_grad": "requires_grad",
}


def guard_of(event: Recompiled) -> Guard:
    """Read the failed guard of a recompile."""
    reason = _AS_TENSOR.sub(r"\g<subject>", event.reason.strip())
    reason = _IN_DICT.sub(lambda found: f".{found['name']}", reason)
    if LEFT_BEHIND.search(reason):
        return Guard("break_value", reason)
    readers: tuple[Callable[[str], Guard | None], ...] = (_global, _tensor, _length, _object, _size, _equal, _truth)
    for read in readers:
        if (found := read(reason)) is not None:
            return _by_source(found, event.source)
    return Guard("other", reason)


def name_of(text: str) -> str:
    """Give what a guard is about without torch's way to reach it: ``module._modules['drop'].p`` is ``drop.p``."""
    shown = _LOCAL.sub(lambda found: found["name"], text.strip())
    shown = _PLAIN_GLOBAL.sub(lambda found: found["name"], _MODULE_GLOBAL.sub("", shown))
    shown = _KEYWORD.sub(lambda found: found["name"], shown)
    shown = _MEMBER.sub(lambda found: f".{found['name']}", shown)
    return shown.removeprefix("module.")


def _global(reason: str) -> Guard | None:
    if (found := _GLOBAL.match(reason)) is None:
        return None
    what = found["what"].strip()
    cause, subject = next(((cause, name) for word, cause, name in _GLOBAL_CAUSES if word in what), ("setting", what))
    return Guard(cause, subject)


def _tensor(reason: str) -> Guard | None:
    if (found := _TENSOR.match(reason)) is None:
        return None
    what, subject = found["what"], found["subject"]
    values = tuple(value for value in (found["before"], found["after"]) if value)
    dim = int(found["dim"]) if found["dim"] else None
    if what in ("size", "rank", "stride", "dtype") and "_parameters[" in subject:
        return Guard("new_object", name_of(subject))  # parameters do not change their look: another one stands there
    if what == "stride":
        values = (f"stride {values[0]}", *values[1:]) if values else ()
    if what == "dispatch key set":
        return Guard(_key_cause(*values), name_of(subject), () if _key_cause(*values) == "grad_mode" else values)
    return Guard(_TENSOR_CAUSES[what], name_of(subject), values, dim)


def _key_cause(before: str = "", after: str = "") -> str:
    """Tell a tensor made in inference mode, which lacks autograd's keys, from one of another device or kind."""
    first, second = (set(re.findall(r"\w+", keys)) for keys in (before, after))
    if all("Autograd" in key or key == "ADInplaceOrView" for key in first ^ second):
        return "grad_mode"
    return "device" if {"Dense", "CPU", "CUDA", "Meta", "XPU", "MPS"} & (first ^ second) else "other"


def _length(reason: str) -> Guard | None:
    if (found := _LENGTH.match(reason)) is None:
        return None
    if (within := _inside(found["subject"])) is not None:
        return Guard("modules", within)
    cause = "arguments" if _is_argument(found["subject"]) else "growth"
    return Guard(cause, name_of(found["subject"]), (found["value"],))


def _inside(subject: str) -> str | None:
    """Give the module whose modules or hooks are meant; None where something else is."""
    place = _INSIDE.search(subject)
    return None if place is None else name_of(subject[: place.start()]).removeprefix("module") or "the model"


def _object(reason: str) -> Guard | None:
    if own := _OWN.match(reason):
        return Guard("new_object", f"{name_of(own['subject'])}.{own['name']}")
    if none := _NONE.match(reason):
        cause = "arguments" if _is_argument(none["subject"]) else "attribute"
        return Guard(cause, name_of(none["subject"]), ("None" if " not " not in reason else "not None",))
    found = _OBJECT.match(reason)
    return Guard("new_object", name_of(found["subject"])) if found else None


def _size(reason: str) -> Guard | None:
    if found := _SIZE_ONE.match(reason):
        return Guard("size", name_of(found["subject"]), ("2 or more", "1"), int(found["dim"]))
    return Guard("size_relation", reason) if _SIZES.search(reason) else None


def _equal(reason: str) -> Guard | None:
    if (found := _EQUAL.match(reason)) is None:
        return None
    subject, value = name_of(found["subject"]), found["value"].strip()
    if subject.rpartition(".")[2] == "training":
        return Guard("train_eval", subject, (value,))
    if _is_argument(found["subject"]):
        return Guard("arguments", subject, (value,))
    if _FLOAT.match(value):
        return Guard("dropout" if _is_probability(subject, value) else "float_attribute", subject, (value,))
    return Guard("int_attribute" if _INTEGER.match(value) else "attribute", subject, (value,))


def _truth(reason: str) -> Guard | None:
    if (found := _TRUTH.match(reason)) is None:
        return None
    if (within := _inside(found["subject"])) is not None:
        return Guard("modules", within)
    cause = "arguments" if _is_argument(found["subject"]) else "growth"
    return Guard(cause, name_of(found["subject"]), ("0",) if reason.startswith("not ") else ())


def _is_argument(text: str) -> bool:
    """Tell an argument of the call, or what is inside one, from what is reached through the module or a global."""
    return "." not in text and not text.strip().startswith("G[")


def _is_probability(subject: str, value: str) -> bool:
    """Tell a dropout's probability by its name; `nn.Dropout` calls it ``p``."""
    name = subject.rpartition(".")[2]
    return 0.0 <= float(value) <= 1.0 and (name == "p" or "drop" in subject.lower())


def _by_source(guard: Guard, source: str) -> Guard:
    """The line tells a probability that has another name: it is handed to a dropout."""
    if guard.cause == "float_attribute" and "dropout" in source and 0.0 <= float(guard.values[0]) <= 1.0:
        return dataclasses.replace(guard, cause="dropout")
    return guard
