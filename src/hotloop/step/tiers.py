"""Tiers: the ways to run a whole step, their names, and what each asks of the compiler."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotloop import presets
from hotloop.errors import ConfigError

GRAPH = "+graph"
BASES: dict[str, dict[str, Any]] = {
    "eager": {},
    "as-given": {},
    "regional": {"preset": "default", "regions": "blocks"},
    "full": {"preset": "default", "regions": "whole"},
    "autotune": {"preset": "max-autotune-no-cudagraphs", "regions": "whole"},
}
"""The arguments for `hotloop.compile` by base; a preset's name is a base as well."""
NAMED = ("eager", "eager+graph", "regional", "regional+graph", "full", "full+graph", "autotune+graph")
"""The tiers that `run="auto"` chooses among; on a CPU only those without a graph."""
ASKED = (*NAMED[:-1], "autotune", NAMED[-1])
"""The tiers that a setting may name; ``auto`` prepares autotuned code for a graph only."""


@dataclasses.dataclass(frozen=True)
class Tier:
    """A way to run a step: what its model is compiled with, and whether it is captured as one graph."""

    base: str
    graph: bool = False

    @property
    def name(self) -> str:
        """The name in settings, status and messages."""
        return self.base + (GRAPH if self.graph else "")

    @property
    def compiles(self) -> bool:
        """Whether hotloop compiles the model for this tier."""
        return self.base not in ("eager", "as-given")

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments for `hotloop.compile`."""
        return dict(BASES.get(self.base) or {"preset": self.base})

    @property
    def makes_kernels(self) -> bool:
        """Whether a compiler generates kernels for this tier, in place of torch's."""
        return self.compiles and presets.get(self.settings["preset"]).backend == "inductor"

    def without_graph(self) -> Tier:
        """Return the tier that runs the same code without a graph."""
        return Tier(self.base)


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
