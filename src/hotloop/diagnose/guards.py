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
        subject: what it is about, as the program's author would write it: ``drop.p``, ``x``; empty for global settings.
        values: what was expected and what came, as far as the text holds them.
        dim: the dimension, for a size.
    """

    cause: str
    subject: str = ""
    values: tuple[str, ...] = ()
    dim: int | None = None


def guard_of(event: Recompiled) -> Guard:
    """Read the failed guard of a recompile."""
    # torch 2.11 makes a float an input of the code after it changed once, and reads it back as a tensor's item.
    text = re.sub(r"___as_tensor\(([^()]+)\)\.item\(\)", r"\1", event.reason.strip())
    text = re.sub(r"\.__dict__\[(['\"])(.+?)\1\]", r".\2", text)
    if LEFT_BEHIND.search(text):
        return Guard("break_value", text)
    guard = _GuardText(text).guard()
    if guard.cause == "float_attribute" and "dropout" in event.source and 0.0 <= float(guard.values[0]) <= 1.0:
        return dataclasses.replace(guard, cause="dropout")  # the line passes a probability of another name to a dropout
    return guard


class _GuardText:
    """torch's text of a guard; each method below `guard` reads one form of it, and returns None for the others."""

    def __init__(self, text: str) -> None:
        self.text = text

    def guard(self) -> Guard:
        """Return the guard, by the first form that fits."""
        forms = (self.setting, self.tensor, self.length, self.object, self.size, self.equal, self.truth)
        return next((guard for form in forms if (guard := form()) is not None), Guard("other", self.text))

    def setting(self) -> Guard | None:
        """Read a change of torch's global state."""
        match = re.match(r"^GLOBAL_STATE changed: (.+)$", self.text)
        if match is None:
            return None
        what = match[1].strip()
        known = {
            "grad_mode": Guard("grad_mode"),
            "inference_mode": Guard("grad_mode"),
            "num_threads": Guard("threads"),
            "autocast": Guard("precision", "autocast"),
            "default_dtype": Guard("precision", "the default dtype"),
        }
        return next((guard for word, guard in known.items() if word in what), Guard("setting", what))

    def tensor(self) -> Guard | None:
        """Read a mismatch of a tensor: its size, stride, dtype, rank, device, requires_grad or dispatch keys."""
        match = re.match(
            r"^tensor '(?P<subject>.+)' (?P<what>size|stride|dtype|rank|device|requires_grad|dispatch key set) mismatch"
            r"(?: at index (?P<dim>\d+))?(?:\. expected (?P<before>.+?))?(?:, actual (?P<after>.+))?$",
            self.text,
        )
        if match is None:
            return None
        what, subject = match["what"], match["subject"]
        if what in ("size", "rank", "stride", "dtype") and "_parameters[" in subject:
            return Guard("new_object", _name(subject))  # a parameter does not change its size or dtype: it was replaced
        values = tuple(value for value in (match["before"], match["after"]) if value)
        cause = {"stride": "strides", "dtype": "precision"}.get(what, what)
        if what == "dispatch key set":
            first, second = (set(re.findall(r"\w+", match[side] or "")) for side in ("before", "after"))
            changed = first ^ second
            # A tensor that was made in inference mode lacks autograd's keys.
            if all("Autograd" in key or key == "ADInplaceOrView" for key in changed):
                return Guard("grad_mode", _name(subject))
            cause = "device" if {"Dense", "CPU", "CUDA", "Meta", "XPU", "MPS"} & changed else "other"
        if what == "stride" and values:
            values = (f"stride {values[0]}", *values[1:])
        return Guard(cause, _name(subject), values, int(match["dim"]) if match["dim"] else None)

    def length(self) -> Guard | None:
        """Read a comparison of a container's length."""
        match = re.match(r"^(?:not )?len\((?P<subject>.+?)\) (?:==|!=|<|>|<=|>=) (?P<value>\d+)$", self.text)
        return None if match is None else self.grown(match["subject"], (match["value"],))

    def truth(self) -> Guard | None:
        """Read whether a container is empty."""
        match = re.match(r"^(?P<not>not )?(?P<subject>[A-Za-z_][\w.\[\]'\"]*)$", self.text)
        return None if match is None else self.grown(match["subject"], ("0",) if match["not"] else ())

    @staticmethod
    def grown(subject: str, values: tuple[str, ...]) -> Guard:
        """Return the guard on a container that grew: a module's modules or hooks, an argument, or another."""
        place = re.search(r"(?:^|\.)_(?:modules|(?:forward|backward)(?:_pre)?_hooks)$", subject)
        if place is not None:
            return Guard("modules", _name(subject[: place.start()]).removeprefix("module") or "the model")
        return Guard("arguments" if _is_argument(subject) else "growth", _name(subject), values)

    def object(self) -> Guard | None:
        """Read a check of an object: its identity or type, None, or what it has of its own in place of its class's."""
        own = re.match(r"^(?:not )?___dict_contains\((['\"])(?P<name>\w+)\1, (?P<subject>.+)\.__dict__\)$", self.text)
        if own:
            return Guard("new_object", f"{_name(own['subject'])}.{own['name']}")
        none = re.match(r"^(?P<subject>\S+) is (?P<value>None|not None)$", self.text)
        if none:
            cause = "arguments" if _is_argument(none["subject"]) else "attribute"
            return Guard(cause, _name(none["subject"]), (none["value"],))
        checks = r"___check_(?:type_id|obj_id|current_backend|torch_function_mode_stack)\(|(?:id|type)\("
        replaced = re.match(rf"^(?:{checks})(?P<subject>[^,)]+)", self.text)
        return Guard("new_object", _name(replaced["subject"])) if replaced else None

    def size(self) -> Guard | None:
        """Read a comparison of sizes."""
        # torch compiles a dimension of size 1 apart: this guard says that 2 or more were expected, and 1 came.
        one = re.match(r"^2 <= (?P<subject>[^<>]+?)\.size\(\)\[(?P<dim>\d+)\]$", self.text)
        if one:
            return Guard("size", _name(one["subject"]), ("2 or more", "1"), int(one["dim"]))
        relation = re.search(r"\.(?:size|stride)\(\)|\bsize\(|^(?:Eq|Ne|Mod)\(|(?:^|[^=])[<>]=?| % ", self.text)
        return Guard("size_relation", self.text) if relation else None

    def equal(self) -> Guard | None:
        """Read a comparison with a value: of the mode, an argument, or an attribute."""
        match = re.match(r"^(?P<subject>[^=!<>]+?) == (?P<value>.+)$", self.text)
        if match is None:
            return None
        subject, value = _name(match["subject"]), match["value"].strip()
        name = subject.rpartition(".")[2]
        if name == "training":
            cause = "train_eval"
        elif _is_argument(match["subject"]):
            cause = "arguments"
        elif re.match(r"^-?(?:\d+\.\d*(?:e-?\d+)?|\d+e-?\d+|nan|inf)$", value):
            named_as_probability = name == "p" or "drop" in subject.lower()  # `nn.Dropout` calls it ``p``
            cause = "dropout" if named_as_probability and 0.0 <= float(value) <= 1.0 else "float_attribute"
        else:
            cause = "int_attribute" if re.match(r"^-?\d+$", value) else "attribute"
        return Guard(cause, subject, (value,))


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
