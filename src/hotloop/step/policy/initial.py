"""The policy that a loop begins with: what was asked for, as far as model, device and other processes allow it."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from hotloop.compiling.apply import sharded_flat
from hotloop.errors import ConfigError
from hotloop.step import layout
from hotloop.step.policy.auto import Auto
from hotloop.step.policy.fixed import Fixed
from hotloop.step.tiers import CHANNELS_LAST, Tier, tier_of_setting

if TYPE_CHECKING:
    from hotloop.presets import Preset
    from hotloop.step.context import Context
    from hotloop.step.policy.policy import Policy

_log = logging.getLogger("hotloop")
_COMPILED = "a compiler chooses the layout of its code itself"


def policy_for(context: Context, run: str | Preset) -> Policy:
    """Return what chooses the tier of a loop's steps, and say where that is not the ``run`` that was asked for.

    Several processes meet here where they will have to agree on compiled code.

    Raises:
        ConfigError: there is no such tier, or it cannot be captured where the model is.
    """
    decided, given = context.reports.decided, context.compiled.given
    if given:
        decided(f"the model runs as it was given: {context.compiled.why_given}", {})
        _log.warning("run=%r: the model runs as it was given: %s", run, context.compiled.why_given)
    tier = tier_of_setting(run)
    run = run if isinstance(run, str) else run.name
    disabled = os.environ.get("HOTLOOP_DISABLE", "")
    if disabled.strip().lower() not in ("", "0", "false", "no"):
        decided(f"HOTLOOP_DISABLE={disabled} is set: steps run eager", {})
        tier = Tier("eager")
    elif tier is not None:
        if given or tier.base == "as-given":
            tier = dataclasses.replace(context.base_tier, graph=tier.graph)
        tier = _laid_out(context, run, tier)
        _check_capture(context, run, tier)
        tier = _check_layout(context, tier)
    elif context.layout == CHANNELS_LAST:
        tier = _check_layout_of_auto(context)
    if context.peers is not None:
        tier = _agreed(context, tier, context.peers.size)
        if tier.compiles:  # else nothing is agreed on, and a single process may have a loop
            context.peers.meet()
    return Auto(context) if tier is None else Fixed(context, tier)


def _check_capture(context: Context, run: str, tier: Tier) -> None:
    """Check that the tier can be captured, where it has a graph."""
    if tier.graph and context.engine is None:
        raise ConfigError(
            f"run {run!r}: whole steps can be captured on a GPU only, and the model is on {context.device}; "
            f"without a graph: run={tier.without_graph().name!r}"
        )
    if tier.graph and tier.makes_kernels and context.engine is not None and not context.engine.kernels:
        raise ConfigError(
            f"run {run!r}: captured_step_emulation() replays torch's operations, and not the kernels that Inductor "
            "makes: of compiled code run='aot_eager+graph' can be captured under it, on a GPU all of it"
        )


def _laid_out(context: Context, run: str, tier: Tier) -> Tier:
    """Return the tier in the layout that was asked for.

    Raises:
        ConfigError: the tier says another layout, or leaves it to a compiler.
    """
    wanted = context.layout
    if wanted == "as-given" and tier.channels_last:
        raise ConfigError(f"layout {wanted!r} with run {run!r}, which is another layout: leave one of the two out")
    if wanted != CHANNELS_LAST or tier.channels_last:
        return tier
    if tier.base != "eager":
        other = " out, or set run='eager'" if tier.compiles else " out"
        raise ConfigError(f"layout {wanted!r} with run {run!r}: {_COMPILED}; leave layout{other}")
    return dataclasses.replace(tier, base=CHANNELS_LAST)


def _check_layout_of_auto(context: Context) -> Tier | None:
    """Check that `auto` can try the layout that was asked for; with several processes, which cannot choose, name it.

    Raises:
        ConfigError: the model is compiled already, or it is not on a GPU.
    """
    asked = f"layout {CHANNELS_LAST!r} with run 'auto'"
    if context.base_tier.base == "as-given":
        raise ConfigError(f"{asked}: the model is compiled already, and {_COMPILED}; leave layout out")
    if context.engine is None:
        raise ConfigError(
            f"{asked}: auto tries this layout on a GPU only, and the model is on {context.device}; leave layout out, "
            f"or set run={CHANNELS_LAST!r}"
        )
    if why := layout.why_not(context.parts.modules()):
        context.reports.decided(f"{asked}: {why}: auto chooses among the other tiers", {})
        _log.warning("%s: %s: auto chooses among the other tiers", asked, why)
        return None
    return None if context.peers is None else Tier(CHANNELS_LAST)


def _check_layout(context: Context, tier: Tier) -> Tier:
    """Return the tier, or the one without the layout where that is of no use, and say why."""
    why = layout.why_not(context.parts.modules()) if tier.channels_last else ""
    if not why:
        return tier
    below = dataclasses.replace(context.base_tier, graph=tier.graph)
    context.reports.decided(f"{tier.name}: {why}: steps run {below.name}", {})
    _log.warning("run=%r: %s: steps run %s", tier.name, why, below.name)
    return below


def _agreed(context: Context, tier: Tier | None, processes: int) -> Tier:
    """Return the tier that several processes can agree on, and say what they leave out."""
    decided, base = context.reports.decided, context.base_tier
    several = f"torch.distributed runs {processes} processes"
    if tier is None:
        decided(f"run='auto': {several}, each with times of its own: steps run {base.name}; name a tier", {})
        tier = base
    flat = any(sharded_flat(module) for module in context.holdings.modules.values())
    parameters = context.holdings.parameters().values()
    if tier.compiles and (flat or any(hasattr(parameter, "placements") for parameter in parameters)):
        how = "FSDP1" if flat else "FSDP2"
        why = f"parameters are sharded ({how}), and a proof cannot exchange them: hotloop.compile the model instead"
        decided(f"{tier.name}: {why}", {})
        tier = base
    if tier.channels_last:
        how = "this layout is proven in one alone: call model.to(memory_format=torch.channels_last) before"
        decided(f"{tier.name}: {several}, and {how}", {})
        tier = dataclasses.replace(base, graph=tier.graph)
    if tier.graph:
        decided(f"{tier.name}: {several}: steps with collectives are not captured", {})
        tier = tier.without_graph()
    return tier
