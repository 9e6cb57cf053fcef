"""What a loop's tiers change of the models: code is installed, removed, and set aside for eager steps."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.module import get_entry
from hotloop.compiling.apply import block_classes
from hotloop.compiling.control import (
    ComponentStatus,
    Installed,
    Status,
    compiles,
    paused,
    precompiled,
    status,
    uncompile,
)
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control.component import Entry
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.compiling.observe import Cause
    from hotloop.presets import Preset

_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}
OF_MODES: Mapping[str | None, Mapping[str, Any]] = {
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune": {**_AUTOTUNE, "triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": _AUTOTUNE,
}
"""The options that torch's modes set: passed as options, so that another option can be added."""


def as_eager_draws(preset: Preset) -> Preset:
    """Return a preset whose compiled code draws the random numbers that eager draws, if its backend can do so.

    The presets below it on its ladder change in the same way: one of them runs where this preset cannot.
    """
    below = tuple(as_eager_draws(presets.get(rung)) for rung in preset.ladder)
    preset = dataclasses.replace(preset, ladder=below)
    if preset.backend != "inductor":
        return preset
    # Inductor's option to draw eager's random numbers, so that a proof can compare the two.
    options = {**OF_MODES.get(preset.mode, {}), **preset.options, "fallback_random": True}
    return dataclasses.replace(preset, mode=None, options=options)


_compiled_by: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Compiled], list[weakref.ref[Entry]]]] = (
    weakref.WeakKeyDictionary()
)
"""The loop that has compiled a model, and the entries that it installed on the model's modules."""


def _is_others(model: torch.nn.Module) -> bool:
    """Return whether another loop has compiled a model; the compiled code of a loop that is gone is removed."""
    if model not in _compiled_by:
        return False
    (by, installed), entries = _compiled_by[model], _entries(model)
    same = len(entries) == len(installed) and all(a is b() for a, b in zip(entries, installed, strict=True))
    if not entries or not same:
        return False  # since then it was uncompiled, or compiled by the user
    if by() is None:
        uncompile(model)
        del _compiled_by[model]
    return by() is not None


def _entries(model: torch.nn.Module) -> list[Entry]:
    return [entry for module in model.modules() if isinstance(entry := get_entry(module), Entry)]


class Compiled:
    """The code that is compiled at present for a loop's models.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.models = {name: getattr(model, "_orig_mod", model) for name, model in models.items()}
        others = any(_is_others(model) for model in self.models.values())
        whys = [why for model in models.values() if (why := precompiled(model)) is not None]
        self.why_given = f"{whys[0].reason} ({whys[0].hint})" if whys else ""
        if whys and others:
            self.why_given = (
                "another Loop compiled it before and is still there, so that stays in force (close() a loop before "
                "another is made on its model, or decorate both steps with one)"
            )
        self.given = bool(whys)
        """The user compiled a model before the loop got it: that code stays as it is."""
        self.tier = Tier("as-given" if self.given else "eager")
        """The tier whose code is in force."""
        self._as_given = dict(models) if self.given else {}
        self._kept: dict[str, list[Installed]] = {}
        self._compiles: Callable[[], int] = int

    def runs_compiled(self) -> bool:
        """Return whether compiled code is in force."""
        return self.given or self.tier.compiles

    @property
    def base(self) -> str:
        """The base of the tier whose code is in force."""
        return self.tier.base

    @property
    def in_blocks(self) -> bool:
        """Whether a model has repeated blocks, so that ``regional`` differs from ``full``."""
        return any(block_classes(model) for model in self.models.values())

    def install(self, tier: Tier) -> None:
        """Run the models as a tier asks; code that is still missing is compiled in the steps that follow.

        Going back and forth between tiers costs next to nothing, since the code of each tier is kept.
        """
        if tier.base == self.base or self.given:
            return
        if self.tier.compiles:
            self._kept[self.base] = [Installed(model) for model in self.models.values()]
        if tier.base in self._kept:
            for installed in self._kept.pop(tier.base):
                installed.put_back()
        elif tier.compiles:
            settings = self.settings(tier)
            for name, model in self.models.items():
                # By its name, so that what is said of it names it; a ModuleDict's parts have names of their own.
                alone = name == "model" or isinstance(model, torch.nn.ModuleDict)
                compile_in_place(model if alone else {name: model}, **settings)
        for model in self.models.values():
            _compiled_by[model] = weakref.ref(self), list(map(weakref.ref, _entries(model)))
        self.tier, self._compiles = tier, compiles(self.models.values())

    def compiles(self) -> int:
        """Return how many graphs were compiled so far for the code in force."""
        return self._compiles()

    def settings(self, tier: Tier) -> dict[str, Any]:
        """Return the arguments for `hotloop.compile`, here and in the background child.

        They must not depend on anything that is learnt while the loop runs, or the background child would fill the
        cache in vain. Whether the step draws random numbers, for example, is known only after its audit, mostly when
        the child has already begun. If it draws none, the option for random numbers changes no code.
        """
        return {**tier.settings, "preset": as_eager_draws(presets.get(tier.settings["preset"]))}

    def instead(self, base: str) -> str:
        """Return the preset that runs in place of the base in force, and why; empty if the base itself runs."""
        if self.given or base != self.base or not self.tier.compiles:
            return ""
        for part in self.status().components.values():
            if part.causes and part.running not in ("none", part.requested):
                return f"runs preset {part.running}: {part.causes[0].reason}"
        return ""

    def idle(self) -> str:
        """Return why nothing of the models runs compiled; empty if some part does, or nothing is to be compiled."""
        if not self.given and not self.tier.compiles:
            return ""
        parts = self.status().components.values()
        if any(part.running != "none" and part.state in ("compiled", "partial") for part in parts):
            return ""
        cause = self.first_cause()
        return cause.reason if cause is not None else "no part of it reached the compiler"

    def first_cause(self) -> Cause | None:
        """Return the first cause why a part does not run as asked, with its line and remedy; None if all parts do."""
        return next((cause for part in self.status().components.values() for cause in part.causes), None)

    def was_warm(self) -> bool:
        """Return whether all the code in force came out of a cache."""
        parts = self.status().components.values()
        return sum(part.cache_hits for part in parts) > 0 and sum(part.cache_misses for part in parts) == 0

    def seconds(self) -> float:
        """Return the seconds that compiling has taken so far for each graph in force."""
        parts = self.status().components.values()
        graphs = max(1, sum(part.compiles for part in parts))
        return sum(part.compile_seconds for part in parts) / graphs

    def remove(self) -> None:
        """Leave the models as they were given, and forget the compiled code."""
        self._kept.clear()
        if self.given:
            return
        if self.tier.compiles:
            for model in self.models.values():
                uncompile(model)
        self.tier = Tier("eager")

    def forget(self, base: str) -> None:
        """Forget the code that was compiled for tiers that will not run any more."""
        self._kept.pop(base, None)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run the models as they were given while the block runs."""
        if self.given:
            yield
            return
        with paused(self.models.values()):
            yield

    def status(self) -> Status:
        """Return the status of each part: what was asked for, and what runs."""
        if not self.given:
            return status(self.models)
        parts: dict[str, ComponentStatus] = {}
        for name, model in self._as_given.items():  # singly: a mapping may hold no wrapper of torch.compile
            found = status(model).components
            parts |= {name if part == "model" else part: state for part, state in found.items()}
        return Status(parts)
