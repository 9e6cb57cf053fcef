"""The compiled code under a loop's tiers: put on, taken off, and set aside for the time of an eager step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from hotloop.compiling.observe import Cause
    from hotloop.presets import Preset
    from hotloop.step.tiers import Tier

_EAGER_RANDOM = "fallback_random"
"""Inductor's option to draw the random numbers that eager draws, so that a proof can compare the two."""
_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}
_GRAPHS = {"triton.cudagraphs": True}
OF_MODES: Mapping[str | None, Mapping[str, Any]] = {
    "reduce-overhead": _GRAPHS,
    "max-autotune": {**_AUTOTUNE, **_GRAPHS},
    "max-autotune-no-cudagraphs": _AUTOTUNE,
}
"""What torch's modes set: given as options, so that another can be added."""


def as_eager_draws(preset: Preset) -> Preset:
    """Give a preset whose compiled code draws the random numbers that eager draws, where there is one.

    So do the presets below it: one of them runs where the machine lacks what this one needs, or it fails.
    """
    below = tuple(as_eager_draws(presets.get(rung)) for rung in preset.ladder)
    preset = dataclasses.replace(preset, ladder=below)
    if preset.backend != "inductor":
        return preset
    options = {**OF_MODES.get(preset.mode, {}), **preset.options, _EAGER_RANDOM: True}
    return dataclasses.replace(preset, mode=None, options=options)


_compiled_by: weakref.WeakKeyDictionary[torch.nn.Module, tuple[weakref.ref[Compiled], list[weakref.ref[Entry]]]] = (
    weakref.WeakKeyDictionary()
)
"""Who of the loops has compiled a model, and what that put on its modules."""
_BY_ANOTHER = (
    "another Loop compiled it before and is still there, so that stays in force (close() a loop before another is made "
    "on its model, or decorate both steps with one)"
)


def _is_others(model: torch.nn.Module) -> bool:
    """Tell whether another loop has compiled a model; what one that is gone has left behind is taken off."""
    if model not in _compiled_by:
        return False
    (by, put_on), there = _compiled_by[model], _entries(model)
    if not there or any(one is not put() for one, put in itertools.zip_longest(there, put_on, fillvalue=_none)):
        return False  # since then it was uncompiled, or compiled by the user
    if by() is None:
        uncompile(model)
        del _compiled_by[model]
    return by() is not None


def _entries(model: torch.nn.Module) -> list[Entry]:
    return [entry for module in model.modules() if isinstance(entry := get_entry(module), Entry)]


def _none() -> None:
    """Stand in for what is there on one side alone."""


class Compiled:
    """What is compiled at present of a loop's models.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.models = {name: getattr(model, "_orig_mod", model) for name, model in models.items()}
        others = any(_is_others(model) for model in self.models.values())
        whys = [why for model in models.values() if (why := precompiled(model)) is not None]
        self.why_given = f"{whys[0].reason} ({whys[0].hint})" if whys else ""
        if whys and others:
            self.why_given = _BY_ANOTHER
        self.given = bool(whys)
        """The user compiled a model before the loop got it: that stays as it is."""
        self.base = "as-given" if self.given else "eager"
        self._as_given = dict(models) if self.given else {}
        self.static = False
        """Whether each shape gets code of its own, where torch would make sizes that vary dynamic."""
        self._kept: dict[str, list[Installed]] = {}
        self._compiles: Callable[[], int] = int

    @property
    def in_blocks(self) -> bool:
        """Tell whether a model has repeated blocks, so that ``regional`` differs from ``full``."""
        return any(block_classes(model) for model in self.models.values())

    def install(self, tier: Tier) -> None:
        """Run the models as a tier asks; what has to be compiled for it is so in the steps that follow.

        Going back and forth between tiers costs next to nothing: what was compiled for one is kept.
        """
        if tier.base == self.base or self.given:
            return
        if self.base != "eager":
            self._kept[self.base] = [Installed(model) for model in self.models.values()]
        if tier.base in self._kept:
            for one in self._kept.pop(tier.base):
                one.put_back()
        elif tier.compiles:
            settings = self.settings(tier)
            for model in self.models.values():
                compile_in_place(model, **settings)
        for model in self.models.values():
            _compiled_by[model] = weakref.ref(self), list(map(weakref.ref, _entries(model)))
        self.base, self._compiles = tier.base, compiles(self.models.values())

    def compiles(self) -> int:
        """Give how much code was compiled so far of what is in force."""
        return self._compiles()

    def settings(self, tier: Tier) -> dict[str, Any]:
        """Give the arguments for `hotloop.compile`, here and in the background child.

        With others it would fill the cache in vain, so they hang on nothing that is learnt on the way: whether the step
        draws random numbers is known only once it was surveyed, mostly after the child has begun. Where it draws none,
        the option changes no code.
        """
        settings = {**tier.settings, **({"dynamic": False} if self.static else {})}
        return {**settings, "preset": as_eager_draws(presets.get(settings["preset"]))}

    def instead(self, base: str) -> str:
        """Say what runs in place of the preset of the base in force, and why; empty where it runs itself."""
        if self.given or base != self.base or base == "eager":
            return ""
        for one in self.status().components.values():
            if one.causes and one.running not in ("none", one.requested):
                return f"runs preset {one.running}: {one.causes[0].reason}"
        return ""

    def idle(self) -> str:
        """Say why nothing of the models runs compiled; empty where something does."""
        parts = list(self.status().components.values())
        if any(one.running != "none" and one.state in ("compiled", "partial") for one in parts):
            return ""
        cause = self.first_cause()
        return cause.reason if cause is not None else "no part of it reached the compiler"

    def first_cause(self) -> Cause | None:
        """Give the first cause of what does not run as asked, with its line and remedy; None where there is none."""
        return next((cause for one in self.status().components.values() for cause in one.causes), None)

    def was_warm(self) -> bool:
        """Tell whether all that is compiled now came out of a cache."""
        parts = self.status().components.values()
        return sum(one.cache_hits for one in parts) > 0 and sum(one.cache_misses for one in parts) == 0

    def seconds(self) -> float:
        """Give what compiling has taken so far, by graph in force."""
        parts = self.status().components.values()
        graphs = max(1, sum(one.compiles for one in parts))
        return sum(one.compile_seconds for one in parts) / graphs

    def remove(self) -> None:
        """Leave the models as they were given, and forget what was compiled."""
        self._kept.clear()
        if not self.given and self.base != "eager":
            for model in self.models.values():
                uncompile(model)
            self.base = "eager"

    def forget(self, base: str) -> None:
        """Forget what was compiled for tiers that will not run any more."""
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
        """Say what runs of what was asked for."""
        if not self.given:
            return status(self.models)
        found: dict[str, ComponentStatus] = {}
        for name, model in self._as_given.items():  # one by one: a mapping may hold no wrapper of torch.compile
            parts = status(model).components
            found |= {name if part == "model" else part: one for part, one in parts.items()}
        return Status(found)
