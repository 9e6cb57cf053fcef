"""Settings of a component as frozen data, checked where they are made: the arguments of `hotloop.compile`."""

from __future__ import annotations

import dataclasses
from collections import abc
from typing import TYPE_CHECKING, Any, Literal, get_args

from hotloop import presets
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    import types
    from collections.abc import Iterable, Mapping

    from hotloop.presets import Preset

Regions = Literal["auto", "whole", "blocks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComponentConfig:
    """The settings of one component.

    Args:
        training: the preset in force while gradients are on.
        inference: the preset in force while gradients are off.
        regions: ``whole``; ``blocks`` (each repeated block and the rest as pieces of their own); or ``auto``.
        fullgraph: raise at the first graph break.
        strict: raise if a compile fails, instead of stepping down.
        ladder: the presets to step down to, ending in ``none``; None takes each preset's own.
    """

    training: Preset
    inference: Preset
    regions: Regions = "auto"
    fullgraph: bool = False
    strict: bool = False
    ladder: tuple[Preset, ...] | None = None

    def ladder_of(self, preset: Preset) -> tuple[Preset, ...]:
        """Return the rungs from ``preset`` down, ending in ``none``."""
        below = self.ladder if self.ladder is not None else tuple(presets.get(name) for name in preset.ladder)
        rungs = [preset, *(rung for rung in below if rung.key != preset.key)]
        if rungs[-1].backend != "eager":
            rungs.append(presets.get("none"))
        return tuple(rungs)


def component_config(  # noqa: PLR0913 - the settings of hotloop.compile
    preset: str | Preset,
    *,
    inference: str | Preset | None = None,
    regions: Regions = "auto",
    dynamic: bool | types.EllipsisType | None = ...,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    ladder: Iterable[str | Preset] | None = None,
    strict: bool = False,
) -> ComponentConfig:
    """Check and resolve the arguments of `hotloop.compile`; an argument that is not set is the preset's.

    Raises:
        ConfigError: an argument does not fit; the message names it, its value and what was expected.
    """
    if regions not in get_args(Regions):
        raise ConfigError(f"regions {regions!r}: expected one of {', '.join(get_args(Regions))}")
    if dynamic is not ... and dynamic not in (None, True, False):
        raise ConfigError(f"dynamic {dynamic!r}: expected True, False or None (automatic)")
    for name, flag in (("fullgraph", fullgraph), ("strict", strict)):
        if not isinstance(flag, bool):
            raise ConfigError(f"{name} {flag!r}: expected True or False")
    if options is not None and not isinstance(options, abc.Mapping):
        raise ConfigError(f"options {options!r}: expected a mapping of option to value, e.g. {{'shape_padding': True}}")
    if isinstance(ladder, str):
        raise ConfigError(f"ladder {ladder!r}: expected a sequence of presets, e.g. ('aot_eager', 'none')")

    def resolve(chosen: str | Preset) -> Preset:
        known = presets.get(chosen)
        return known if known.backend == "eager" else known.with_(dynamic=dynamic, options=options)

    training = resolve(preset)
    return ComponentConfig(
        training=training,
        inference=training if inference is None else resolve(inference),
        regions=regions,
        fullgraph=fullgraph,
        strict=strict,
        ladder=None if ladder is None else tuple(presets.get(rung) for rung in ladder),
    )
