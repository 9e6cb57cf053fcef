"""Tiers: the ways to run a whole step, their names, and what each asks of the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotloop import presets
from hotloop.compiling.control import validate
from hotloop.errors import ConfigError

GRAPH = "+graph"
CHANNELS_LAST = "channels_last"
LAYOUTS = ("auto", CHANNELS_LAST, "as-given")
"""What a loop may be told of the layout that convolutions compute in."""
BASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "as-given": {},
    CHANNELS_LAST: {},
    "regional": {"preset": "default", "regions": "blocks"},
    "full": {"preset": "default", "regions": "whole"},
    "autotune": {"preset": "max-autotune-no-cudagraphs", "regions": "whole"},
}
"""The arguments for `hotloop.compile` by base; a preset's name is a base as well."""
NAMED = (
    *("eager", "eager+graph", CHANNELS_LAST, CHANNELS_LAST + GRAPH),
    *("regional", "regional+graph", "full", "full+graph", "autotune+graph"),
)
"""The tiers that `run="auto"` chooses among; on a CPU only those without a graph."""
ASKED = (*NAMED[:-1], "autotune", NAMED[-1])
"""The tiers that a setting may name; ``auto`` prepares autotuned code for a graph only."""


@dataclasses.dataclass(frozen=True)
class Tier:
    """A way to run a step: what its model is compiled with, and whether it is captured as one graph."""

    base: str
    graph: bool = False
    preset: presets.Preset | None = dataclasses.field(default=None, compare=False)
    """The user's own preset that ``base`` names; None where ``base`` is a name of hotloop's."""

    @property
    def name(self) -> str:
        """The name in settings, status and messages."""
        return self.base + (GRAPH if self.graph else "")

    @property
    def compiles(self) -> bool:
        """Whether hotloop compiles the model for this tier."""
        return self.base not in ("eager", "as-given", CHANNELS_LAST)

    @property
    def channels_last(self) -> bool:
        """Whether convolutions compute channels last in this tier."""
        return self.base == CHANNELS_LAST

    @property
    def other_kernels(self) -> bool:
        """Whether steps run by other kernels than the models' as given, which round otherwise and have to be proven."""
        return self.compiles or self.channels_last

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments for `hotloop.compile`."""
        return {"preset": self.preset} if self.preset else dict(BASES.get(self.base) or {"preset": self.base})

    @property
    def makes_kernels(self) -> bool:
        """Whether a compiler generates kernels for this tier, in place of torch's."""
        return self.compiles and presets.get(self.settings["preset"]).backend == "inductor"

    def without_graph(self) -> Tier:
        """Return the tier that runs the same code without a graph."""
        return dataclasses.replace(self, graph=False)


def tier_of_setting(run: Any) -> Tier | None:
    """Return the tier that a setting ``run`` asks for, a name or the user's own preset; None for ``auto``.

    Raises:
        ConfigError: there is no such tier or preset; the user's preset has a name that is taken, or an unknown option.
    """
    if isinstance(run, presets.Preset):
        return _tier_of_preset(run)
    if not isinstance(run, str):
        raise ConfigError(
            f"run {run!r}: expected 'auto', a tier ({', '.join(ASKED)}), a preset's name, or a hotloop.Preset"
        )
    return None if run.strip().lower() == "auto" else parse(run)


def _tier_of_preset(preset: presets.Preset) -> Tier:
    """Return the tier of a preset; the name of the user's own may end in ``+graph``, as a tier's does."""
    base, plus, _ = preset.name.strip().partition(GRAPH)
    if preset == presets.PRESETS.get(base):
        return parse(preset.name)
    if not base or base.lower() == "auto" or base.lower() in BASES or base.lower() in presets.PRESETS:
        raise ConfigError(
            f"run {preset!r}: name {preset.name!r} is taken by hotloop or empty; expected a name of its own, such as "
            f"'my-{base.lower() or 'preset'}', which may end in {GRAPH}"
        )
    if plus and preset.cudagraphs:
        raise ConfigError(
            f"run {preset.name!r}: its mode or options capture CUDA graphs of their own, which cannot be nested: leave "
            f"{GRAPH} out of its name, or triton.cudagraphs and the mode out of its settings"
        )
    validate(preset)
    return Tier("eager", bool(plus)) if preset.backend == "eager" else Tier(base, bool(plus), preset)


def parse(name: str) -> Tier:
    """Read a tier's or preset's name, with or without ``+graph``, in upper or lower case.

    Raises:
        ConfigError: there is no such tier or preset.
    """
    base, plus, rest = name.strip().lower().partition(GRAPH)
    if not rest and base in BASES:
        return Tier(base, bool(plus))
    if not rest:
        try:
            found = presets.get(base).name
        except ConfigError:
            found = ""
        if found and plus and presets.get(base).cudagraphs:
            raise ConfigError(
                f"run {name!r}: preset {found} captures CUDA graphs of its own, which cannot be nested: "
                f"use run={found!r}, or run='inductor+graph'"
            )
        if found:
            return Tier("eager" if found == "none" else found, bool(plus))
    known = ("auto", *ASKED, *presets.PRESETS)
    raise ConfigError(f"run {name!r}: {presets.expected(name, known)}; a preset may end in {GRAPH}")
