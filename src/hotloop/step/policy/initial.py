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
from hotloop.step.tiers import Tier, tier_of_setting

if TYPE_CHECKING:
    from hotloop.presets import Preset
    from hotloop.step.context import Context
    from hotloop.step.policy.policy import Policy

_log = logging.getLogger("hotloop")


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
        _check_capture(context, run, tier)
        tier = _check_layout(context, tier)
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
