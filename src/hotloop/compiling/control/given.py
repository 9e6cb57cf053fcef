"""What of a model was compiled before hotloop was handed it: told in one way by the loop and all integrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hotloop._torch.module import get_entry
from hotloop.compiling.apply import compiled_by_torch
from hotloop.compiling.apply.targets import without_wrappers
from hotloop.compiling.control.component import Entry
from hotloop.compiling.observe import Cause

if TYPE_CHECKING:
    import torch

AS_GIVEN: Final = "as-given"
_NAMED = 3
"""Modules that a reason names; repeated blocks may be many."""


def given(model: torch.nn.Module) -> Cause | None:
    """Say why a model runs as it was given: what compiled it, or parts of it, before; None where nothing did.

    The reason names the modules by their path inside of frameworks' wrappers; the hint says what to hand over instead.
    """
    if (found := compiled_by_user(model)) is not None:
        return found
    paths = _paths(model, [name for name, one in model.named_modules() if isinstance(get_entry(one), Entry)])
    if not paths:
        return None
    reason = f"hotloop.compile was called on {_named(paths)} before, and stays in force"
    return _cause(reason, "hotloop.uncompile(model) before it, and it is hotloop's to choose how the model runs")


def compiled_by_user(model: torch.nn.Module) -> Cause | None:
    """Say what of a model its user compiled by torch's own means, and is in force; None where nothing is."""
    did, hint = _by_user(model, over=False)
    if not did:
        return None
    return _cause(f"{did} before, and stays in force: hotloop has no count of it and no fallback for it", hint)


def compiled_over(model: torch.nn.Module) -> str:
    """Say what of a model that hotloop compiled its user had compiled by torch's own means; empty where nothing was."""
    did, hint = _by_user(model, over=True)
    return f"{did} before, and hotloop.compile compiles over it: {hint}" if did else ""


def _by_user(model: torch.nn.Module, *, over: bool) -> tuple[str, str]:
    wrapped = _paths(model, compiled_by_torch(model))
    entries = [(name, get_entry(one)) for name, one in model.named_modules()]
    entries = [(name, one.before if over and isinstance(one, Entry) else one) for name, one in entries]
    in_place = _paths(model, [name for name, one in entries if one is not None and not isinstance(one, Entry)])
    did = [f"torch.compile() wrapped {_named(wrapped)}"] if wrapped else []
    did += [f"module.compile() was called on {_named(in_place)}"] if in_place else []
    calls = [call for call, found in (("torch.compile()", wrapped), ("module.compile()", in_place)) if found]
    inner = " (now model._orig_mod)" if "_orig_mod" in dict(model.named_children()) else ""
    hint = f"leave out {' and '.join(calls)}, and hand over the module itself{inner}, which hotloop then compiles alone"
    return " and ".join(did), hint


def _cause(reason: str, hint: str) -> Cause:
    return Cause(reason, AS_GIVEN, None, None, "", hint)


def _paths(model: torch.nn.Module, names: list[str]) -> list[str]:
    """Give paths as a user knows them: without the wrappers that frameworks and torch put around a model."""
    return list(dict.fromkeys(without_wrappers(model, name) for name in names))


def _named(paths: list[str]) -> str:
    if "" in paths:
        return "the model"
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f"{', '.join(paths[:_NAMED])}{more}"
