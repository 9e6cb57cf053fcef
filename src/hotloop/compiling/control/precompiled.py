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
_MOST = 3
"""Modules that are named: repeated blocks may be many."""


def precompiled(model: torch.nn.Module) -> Cause | None:
    """Return why a model runs as it was given: who compiled it, or parts of it, before; None where nobody did."""
    if (by_user := compiled_by_user(model)) is not None:
        return by_user
    ours = [path for path, part in model.named_modules() if isinstance(get_entry(part), Entry)]
    if not ours:
        return None
    reason = f"hotloop.compile was called on {_named(model, ours)} before, and stays in force"
    hint = "hotloop.uncompile(model) before it, and it is hotloop's to choose how the model runs"
    return Cause(reason, AS_GIVEN, hint=hint)


def compiled_by_user(model: torch.nn.Module) -> Cause | None:
    """Return what of a model its user compiled by torch's own means, and is in force; None where nothing is."""
    entries = {path: get_entry(part) for path, part in model.named_modules()}
    in_place = [path for path, entry in entries.items() if entry is not None and not isinstance(entry, Entry)]
    paths = [*compiled_by_torch(model), *in_place]
    if not paths:
        return None
    reason = f"torch compiled {_named(model, paths)} before, and that stays in force: hotloop neither counts it nor"
    return Cause(
        f"{reason} falls back",
        AS_GIVEN,
        hint="leave out torch.compile() and module.compile(), and hand over the module itself",
    )


def _named(model: torch.nn.Module, paths: Iterable[str]) -> str:
    """Name modules as a user knows them, without wrappers of frameworks and torch."""
    known = list(dict.fromkeys(without_wrappers(model, path) for path in paths))
    if "" in known:
        return "the model"
    more = f" and {len(known) - _MOST} more" if len(known) > _MOST else ""
    return f"{', '.join(known[:_MOST])}{more}"
