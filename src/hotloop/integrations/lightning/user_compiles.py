"""Finds what the user compiled of a LightningModule, in which way, and what to change so that HotLoop may do it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop._torch.module import get_entry
from hotloop.compiling.apply import compiled_by_torch
from hotloop.compiling.control import status
from hotloop.compiling.control.component import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    import lightning.pytorch as pl


@dataclasses.dataclass(frozen=True)
class UserCompile:
    """A compile that the user made.

    Args:
        what: what was compiled, and how.
        hint: what to change.
        by_torch: whether torch's own compile did it, which cannot trace ``self.log``; else `hotloop.compile`.
    """

    what: str
    hint: str
    by_torch: bool = True


def compiled_by_user(module: pl.LightningModule) -> list[UserCompile]:
    """List what the user compiled of a module, with an entry for each way; empty where it is eager."""
    return [*_by_torch(module), *_by_hotloop(module)]


def _by_torch(module: pl.LightningModule) -> Iterator[UserCompile]:
    by_lightning = getattr(module, "_compiler_ctx", None) is not None
    if by_lightning:
        yield UserCompile(
            "the Trainer was given torch.compile(module), of which Lightning makes compiled forward and *_step methods",
            "hand fit() the module itself, without torch.compile: HotLoop compiles its *_step methods, self.log breaks "
            "no graph, and a failure falls back",
        )
    wrapped = [name for name in compiled_by_torch(module) if name]
    if wrapped:
        held = wrapped[0]
        yield UserCompile(
            f"torch.compile wraps {_attributes(wrapped)}",
            f"assign the module itself where the class has self.{held} = torch.compile(...): HotLoop compiles it with "
            f"the step around it, and its names in checkpoints lose their ._orig_mod ({held}._orig_mod.weight is "
            f"{held}.weight then)",
        )
    entries = [(name, get_entry(part)) for name, part in module.named_modules()]
    in_place = [name for name, entry in entries if entry is not None and not isinstance(entry, Entry)]
    if "" in in_place:
        yield UserCompile(
            f"{type(module).__name__}.compile() was called on the module itself, which compiles module(x): the Trainer "
            "calls training_step, so nothing but what that computes by self(...) runs compiled",
            "leave module.compile() out: HotLoop compiles training_step itself, with the loss",
        )
    inside = [name for name in in_place if name]
    if inside:
        yield UserCompile(
            f"{_attributes(inside)} was compiled in place, by module.compile()",
            f"leave {inside[0]}.compile() out: HotLoop compiles it with the step around it, and a failure falls back",
        )
    steps = ("training_step", "validation_step", "test_step", "predict_step")
    compiled = [name for name in steps if hasattr(getattr(module, name, None), "get_compiler_config")]
    if compiled and not by_lightning:
        yield UserCompile(
            f"torch.compile was applied to {_attributes(compiled)}",
            f"leave torch.compile out at {compiled[0]}: HotLoop compiles it, self.log breaks no graph then",
        )


def _by_hotloop(module: pl.LightningModule) -> Iterator[UserCompile]:
    parts = {name: part for name, part in status(module).components.items() if part.requested != "none"}
    if parts and any(isinstance(get_entry(part), Entry) for part in module.modules()):
        what = "the module" if "model" in parts else _attributes(list(parts))
        preset = next(iter(parts.values())).requested
        yield UserCompile(
            f"{what} was compiled in place before fit, by hotloop.compile",
            f"leave hotloop.compile out: with HotLoop(run={preset!r}) a loop owns the step, proves what it "
            "compiles and undoes what fails",
            by_torch=False,
        )


def _attributes(names: list[str]) -> str:
    return ", ".join(f"self.{name}" for name in names)
