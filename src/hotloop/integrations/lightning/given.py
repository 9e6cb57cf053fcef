"""What of a LightningModule its user compiled, by which way, and what to change so that HotLoop may do it."""

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

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_WRAPPED = "._orig_mod"


@dataclasses.dataclass(frozen=True)
class Given:
    """One compile of the user's.

    Args:
        what: what was compiled, and how.
        hint: what to change.
        by_torch: whether torch's own compile did it, which cannot trace ``self.log``; else `hotloop.compile`.
    """

    what: str
    hint: str
    by_torch: bool = True


def compiled_by_user(module: pl.LightningModule) -> list[Given]:
    """Name what the user compiled of a module, each way by itself; nothing where it is eager."""
    return [*_whole(module), *_wrapped(module), *_in_place(module), *_methods(module), *_by_hotloop(module)]


def _whole(module: pl.LightningModule) -> Iterator[Given]:
    if getattr(module, "_compiler_ctx", None) is not None:
        yield Given(
            "the Trainer was given torch.compile(module), of which Lightning makes compiled forward and *_step methods",
            "hand fit() the module itself, without torch.compile: HotLoop compiles its *_step methods, self.log breaks "
            "no graph, and a failure falls back",
        )


def _wrapped(module: pl.LightningModule) -> Iterator[Given]:
    names = [name for name in compiled_by_torch(module) if name]
    if names:
        held = names[0]
        yield Given(
            f"torch.compile wraps {_of(names)}",
            f"assign the module itself where the class has self.{held} = torch.compile(...): HotLoop compiles it with "
            f"the step around it, and its names in checkpoints lose their {_WRAPPED} ({held}{_WRAPPED}.weight is "
            f"{held}.weight then)",
        )


def _in_place(module: pl.LightningModule) -> Iterator[Given]:
    names = [name for name, one in module.named_modules() if _torchs_entry(one)]
    inside = [name for name in names if name]
    if "" in names:
        kind = type(module).__name__
        yield Given(
            f"{kind}.compile() was called on the module itself, which compiles module(x): the Trainer calls "
            "training_step, so nothing but what that computes by self(...) runs compiled",
            "leave module.compile() out: HotLoop compiles training_step itself, with the loss",
        )
    if inside:
        yield Given(
            f"{_of(inside)} was compiled in place, by module.compile()",
            f"leave {inside[0]}.compile() out: HotLoop compiles it with the step around it, and a failure falls back",
        )


def _torchs_entry(module: pl.LightningModule | object) -> bool:
    entry = get_entry(module)  # type: ignore[arg-type]
    return entry is not None and not isinstance(entry, Entry)


def _methods(module: pl.LightningModule) -> Iterator[Given]:
    if getattr(module, "_compiler_ctx", None) is not None:  # Lightning itself put them there
        return
    names = [name for name in _STEPS if hasattr(getattr(module, name, None), "get_compiler_config")]
    if names:
        yield Given(
            f"torch.compile was applied to {_of(names)}",
            f"leave torch.compile out at {names[0]}: HotLoop compiles it, self.log breaks no graph then",
        )


def _by_hotloop(module: pl.LightningModule) -> Iterator[Given]:
    parts = {name: one for name, one in status(module).components.items() if one.requested != "none"}
    if parts and any(isinstance(get_entry(one), Entry) for one in module.modules()):
        what = "the module" if "model" in parts else _of(list(parts))
        preset = next(iter(parts.values())).requested
        yield Given(
            f"{what} was compiled in place before fit, by hotloop.compile",
            f"leave hotloop.compile out: with HotLoop(run={preset!r}) a loop owns the step, proves what it "
            "compiles and undoes what fails",
            by_torch=False,
        )


def _of(names: list[str]) -> str:
    return ", ".join(f"self.{name}" for name in names)
