"""The policy that a loop begins with: what was asked for, as far as model, device and other processes allow it."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import TYPE_CHECKING

from hotloop._torch.hooks import calls_hooks
from hotloop._torch.sharded import is_spread
from hotloop._torch.wrappers import stop_timing, why_not_at_first
from hotloop.compiling.apply import sharded_flat
from hotloop.errors import ConfigError
from hotloop.step import layout
from hotloop.step.policy.agreed_auto import AgreedAuto
from hotloop.step.policy.auto import Auto
from hotloop.step.policy.policy import Fixed, Policy
from hotloop.step.ranks.peers import Peers
from hotloop.step.tiers import CHANNELS_LAST, Tier, tier_of_setting

if TYPE_CHECKING:
    from hotloop.presets import Preset
    from hotloop.step.context import Context

_log = logging.getLogger("hotloop")
_GIVEN_OUT = "and a proof cannot exchange them: hotloop.compile the model instead"
_PROVEN_ALONE = (
    "this layout is proven in one alone: call model.to(memory_format=torch.channels_last) before; of a model "
    "for fully_shard, which refuses such parameters, lay out the inputs alone"
)
_COMPILED = "a compiler chooses the layout of its code itself"


def policy_for(context: Context, run: str | Preset, sentinel: float) -> Policy:
    """Return what chooses the tier of a loop's steps, and say where that is not the ``run`` that was asked for.

    Several processes meet here where they will have to agree on compiled code or recordings.

    Args:
        context: the loop's.
        run: what was asked for.
        sentinel: the share of time that checks may cost.

    Raises:
        ConfigError: there is no such tier, it cannot be captured where the model is, or other processes were asked
            for something else.
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
    elif without := [name for name, one in context.holdings.optimizers.items() if not calls_hooks(one)]:
        tier = _hookless(context, without[0], run, chooses=tier is None)
    elif tier is not None:
        if given or tier.base == "as-given":
            tier = dataclasses.replace(context.base_tier, graph=tier.graph)
        tier = _laid_out(context, run, tier)
        _check_capture(context, run, tier)
        tier = _check_layout(context, tier)
    elif context.layout == CHANNELS_LAST:
        _check_layout_of_auto(context)
    chooses = tier is None
    tier = _unless_sharded(context, tier)
    peers = context.peers
    if isinstance(peers, Peers) and tier is None:
        return _auto_of_several(context, peers, sentinel)
    if isinstance(peers, Peers) and tier is not None:
        tier = _agreed(context, tier, peers.size, chooses=chooses)
        if tier.compiles or tier.graph:  # else nothing is agreed on, and a single process may have a loop
            peers.meet(tier, "", sentinel)
    return Auto(context) if tier is None else Fixed(context, tier)


def _hookless(context: Context, name: str, run: str, *, chooses: bool) -> Tier:
    """Say why the models run as given: nobody learns when such an optimizer writes, or what it freezes."""
    kind = type(context.holdings.optimizers[name]).__name__
    why = f"{name} ({kind}) calls no hooks of torch.optim.Optimizer, as it leaves out super().__init__()"
    context.reports.decided(f"{why}: steps run {context.base_tier.name}", {})
    if not chooses:
        _log.warning("run=%r: %s: steps run %s", run, why, context.base_tier.name)
    return context.base_tier


def _check_capture(context: Context, run: str, tier: Tier) -> None:
    """Check that the tier can be captured, where it has a graph."""
    if tier.graph and context.engine is None:
        raise ConfigError(
            f"run {run!r}: whole steps can be captured on a GPU only, and the model is on {context.device}; "
            f"without a graph: run={tier.without_graph().name!r}, or run='auto', which chooses what pays there"
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


def _check_layout_of_auto(context: Context) -> None:
    """Check that `auto` can try the layout that was asked for; say where it chooses among other tiers instead.

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
    why = layout.why_not(context.parts.modules())
    if not why and not context.peers.alone:
        why = f"{_several(context.peers.size)}, and {_PROVEN_ALONE}"
    if why:
        context.reports.decided(f"{asked}: {why}: auto chooses among the other tiers", {})
        _log.warning("%s: %s: auto chooses among the other tiers", asked, why)


def _check_layout(context: Context, tier: Tier) -> Tier:
    """Return the tier, or the one without the layout where that is of no use, and say why."""
    why = layout.why_not(context.parts.modules()) if tier.channels_last else ""
    if not why:
        return tier
    below = dataclasses.replace(context.base_tier, graph=tier.graph)
    context.reports.decided(f"{tier.name}: {why}: steps run {below.name}", {})
    _log.warning("run=%r: %s: steps run %s", tier.name, why, below.name)
    return below


def _auto_of_several(context: Context, peers: Peers, sentinel: float) -> Policy:
    """Return `auto` of several processes, which meet here; or the models as given where it tries nothing, and say why.

    On a CPU they would have to keep pace for a gain that is small, and that only long runs pay for.
    """
    base, why = context.base_tier, ""
    if context.engine is None:
        why = f"nothing can be captured on {context.device}: name a compiled tier, run='full'"
    elif base.base != "eager":
        why = "the model is compiled already: name its tier, run='as-given+graph'"
    elif not context.parts.wrappers() and not context.parts.sharded():
        why = "the loop was given no DistributedDataParallel: Loop(DistributedDataParallel(model), optimizer)"
    if why:
        context.reports.decided(f"run='auto' in several processes: {why}. Steps run {base.name}", {})
        return Fixed(context, base)
    tier = dataclasses.replace(base, graph=True)
    peers.meet(_agreed(context, tier, peers.size, chooses=True), "auto", sentinel)
    return AgreedAuto(context)


def _unless_sharded(context: Context, tier: Tier | None) -> Tier | None:
    """Return the tier, or the models as given where parameters are sharded in a way that rules the tier out."""
    wanted = dataclasses.replace(context.base_tier, graph=True) if tier is None else tier
    if wanted.graph or wanted.compiles:
        context.parts.sharded().rest()  # an evaluation before has left whole parameters
    why = _why_sharding_rules_out(context, wanted) if wanted.other_kernels or wanted.graph else ""
    return _left_out(context, wanted, why, context.base_tier, chooses=tier is None) if why else tier


def _why_sharding_rules_out(context: Context, tier: Tier) -> str:
    """Say why a tier cannot run with parameters that are sharded; empty where it can, or where none are."""
    if any(sharded_flat(module) for module in context.holdings.modules.values()):
        return f"parameters are sharded (FSDP1), {_GIVEN_OUT}"
    spread = [one for one in context.holdings.parameters().values() if is_spread(one)]
    sharded = context.parts.sharded()
    if not spread and not sharded:
        return ""
    if not all(map(sharded.holds, spread)):
        return f"parameters are spread over processes by DTensor alone (tensor parallelism), {_GIVEN_OUT}"
    if why := sharded.why_never_recorded():
        return f"parameters are sharded (FSDP2), and {why}: hotloop.compile the model instead"
    if tier.base == "eager" or tier.compiles:
        return ""
    stays = "their layout stays as it is" if tier.channels_last else "the model is compiled already"
    return f"parameters are sharded (FSDP2), and {stays}: an uncompiled model takes run='eager+graph' or 'full+graph'"


def _left_out(context: Context, tier: Tier, why: str, instead: Tier, *, chooses: bool) -> Tier:
    """Say why a tier is left out, and return the one that is taken instead; a warning where it was named."""
    context.reports.decided(f"{tier.name}: {why}", {})
    if not chooses:
        _log.warning("run=%r: %s: steps run %s", tier.name, why, instead.name)
    return instead


def _several(processes: int) -> str:
    return f"torch.distributed runs {processes} processes"


def _agreed(context: Context, tier: Tier, processes: int, *, chooses: bool) -> Tier:
    """Return the tier that several processes can agree on, and say what they leave out."""
    base = context.base_tier

    def left_out(why: str, instead: Tier) -> Tier:
        return _left_out(context, tier, why, instead, chooses=chooses)

    if tier.channels_last:
        why = f"{_several(processes)}, and {_PROVEN_ALONE}"
        tier = left_out(why, dataclasses.replace(base, graph=tier.graph))
    wrappers = context.parts.wrappers() if tier.graph else []
    if why := next(filter(None, map(why_not_at_first, wrappers)), ""):
        return left_out(why, tier.without_graph())
    for wrapper in wrappers:
        stop_timing(wrapper)
    return tier
