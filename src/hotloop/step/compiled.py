"""The compiled code under a loop's tiers: put on, taken off, and set aside for the time of an eager step."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hotloop import presets
from hotloop.apply import block_classes
from hotloop.control import ComponentStatus, Installed, Status, given, paused, status, uncompile
from hotloop.control import compile as compile_in_place
from hotloop.presets import Preset

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from hotloop.step.tiers import Tier

_EAGER_RANDOM = "fallback_random"
"""Inductor's option to draw the random numbers that eager draws, so that a proof can compare the two."""
_AUTOTUNE = {"max_autotune": True, "coordinate_descent_tuning": True}
"""What torch's mode ``max-autotune-no-cudagraphs`` sets; given as options, so that another can be added."""


def as_eager_draws(preset: Preset) -> Preset:
    """Give a preset whose compiled code draws the random numbers that eager draws, where there is one."""
    if preset.backend != "inductor":
        return preset
    options: dict[str, Any] = {**preset.options, _EAGER_RANDOM: True}
    if preset.mode is None:
        return preset.with_(options=options)
    if preset.mode != "max-autotune-no-cudagraphs":
        return preset
    return Preset(name=preset.name, backend="inductor", options={**_AUTOTUNE, **options}, ladder=preset.ladder)


class Compiled:
    """What is compiled at present of a loop's models.

    Args:
        models: by name.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module]) -> None:
        self.models = {name: getattr(model, "_orig_mod", model) for name, model in models.items()}
        whys = [why for model in models.values() if (why := given(model)) is not None]
        self.why_given = f"{whys[0].reason} ({whys[0].hint})" if whys else ""
        self.given = bool(whys)
        """The user compiled a model before the loop got it: that stays as it is."""
        self.base = "as-given" if self.given else "eager"
        self._as_given = dict(models) if self.given else {}
        self.static = False
        """Whether each shape gets code of its own, where torch would make sizes that vary dynamic."""
        self._kept: dict[str, list[Installed]] = {}

    @property
    def in_blocks(self) -> bool:
        """Tell whether a model has repeated blocks, so that ``regional`` differs from ``full``."""
        return any(block_classes(model) for model in self.models.values())

    def put_on(self, tier: Tier) -> None:
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
        self.base = tier.base

    def settings(self, tier: Tier) -> dict[str, Any]:
        """Give the arguments for `hotloop.compile`, here and in the background child.

        With others it would fill the cache in vain, so they hang on nothing that is learnt on the way: whether the step
        draws random numbers is known only once it was surveyed, mostly after the child has begun. Where it draws none,
        the option changes no code.
        """
        settings = {**tier.settings, **({"dynamic": False} if self.static else {})}
        return {**settings, "preset": as_eager_draws(presets.get(settings["preset"]))}

    def idle(self) -> str:
        """Say why nothing of the models runs compiled; empty where something does."""
        parts = list(self.status().components.values())
        if any(one.running != "none" and one.state in ("compiled", "partial") for one in parts):
            return ""
        causes = [cause.reason for one in parts for cause in one.causes]
        return causes[0] if causes else "no part of it reached the compiler"

    def was_warm(self) -> bool:
        """Tell whether all that is compiled now came out of a cache."""
        parts = self.status().components.values()
        return sum(one.cache_hits for one in parts) > 0 and sum(one.cache_misses for one in parts) == 0

    def seconds(self) -> float:
        """Give what compiling has taken so far, by graph in force."""
        parts = self.status().components.values()
        graphs = max(1, sum(one.compiles for one in parts))
        return sum(one.compile_seconds for one in parts) / graphs

    def take_off(self) -> None:
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
