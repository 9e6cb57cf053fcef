"""Which modules of a model were compiled before hotloop got it: worded once for the loop and all integrations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hotloop._torch.module import get_entry
from hotloop.compiling.apply.targets import compiled_by_torch, without_wrappers
from hotloop.compiling.control.component import Entry
from hotloop.compiling.observe import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

AS_GIVEN: Final = "as-given"


def precompiled(model: torch.nn.Module) -> Cause | None:
    """Return why a model runs as it was given: who compiled it, or parts of it, before; None where nobody did.

    The reason names the modules by their path inside of frameworks' wrappers; the hint says what to hand over instead.
    """
    if (by_user := compiled_by_user(model)) is not None:
        return by_user
    named = _named(model, [path for path, part in model.named_modules() if isinstance(get_entry(part), Entry)])
    if not named:
        return None
    reason = f"hotloop.compile was called on {named} before, and stays in force"
    hint = "hotloop.uncompile(model) before it, and it is hotloop's to choose how the model runs"
    return Cause(reason, AS_GIVEN, hint=hint)


def compiled_by_user(model: torch.nn.Module) -> Cause | None:
    """Return what of a model its user compiled by torch's own means, and is in force; None where nothing is."""
    calls, hint = _users_calls(model, over=False)
    if not calls:
        return None
    reason = f"{calls} before, and stays in force: hotloop has no count of it and no fallback for it"
    return Cause(reason, AS_GIVEN, hint=hint)


def compiled_over(model: torch.nn.Module) -> str:
    """Return what of a model its user had compiled before hotloop compiled over it; empty where nothing was."""
    calls, hint = _users_calls(model, over=True)
    return f"{calls} before, and hotloop.compile compiles over it: {hint}" if calls else ""


def _users_calls(model: torch.nn.Module, *, over: bool) -> tuple[str, str]:
    """Return which of torch's compile calls the user made on which modules, and what to do instead; empty for none.

    ``over``: count calls as well whose entry hotloop's own entry has replaced.
    """
    in_place = []
    for path, part in model.named_modules():
        entry = get_entry(part)
        if over and isinstance(entry, Entry):
            entry = entry.before
        if entry is not None and not isinstance(entry, Entry):
            in_place.append(path)
    made, calls = [], []
    if named := _named(model, compiled_by_torch(model)):
        made.append(f"torch.compile() wrapped {named}")
        calls.append("torch.compile()")
    if named := _named(model, in_place):
        made.append(f"module.compile() was called on {named}")
        calls.append("module.compile()")
    inner = " (now model._orig_mod)" if "_orig_mod" in dict(model.named_children()) else ""
    hint = f"leave out {' and '.join(calls)}, and hand over the module itself{inner}, which hotloop then compiles alone"
    return " and ".join(made), hint


def _named(model: torch.nn.Module, paths: Iterable[str], most: int = 3) -> str:
    """Name modules as a user knows them, without wrappers of frameworks and torch; empty for no modules.

    Repeated blocks may be many, so only the first ``most`` are named.
    """
    known = list(dict.fromkeys(without_wrappers(model, path) for path in paths))
    if "" in known:
        return "the model"
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f"{', '.join(known[:most])}{more}"
