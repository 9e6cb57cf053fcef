"""The tier that a loop begins with: what was asked for, as far as model, device and other processes allow it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from hotloop.compiling.apply import sharded_flat
from hotloop.errors import ConfigError
from hotloop.step.tiers import Tier, parse

if TYPE_CHECKING:
    from hotloop.step.loop.loop import Loop

_log = logging.getLogger("hotloop")


def requested(loop: Loop, run: str) -> Tier | None:
    """Give the tier that steps are to run in; None where `auto` is to choose it.

    Raises:
        ConfigError: there is no such tier, or it cannot be captured where the model is.
    """
    if loop.compiled.given:
        loop.account.decided(f"the model runs as it was given: {loop.compiled.why_given}", {})
        _log.warning("run=%r: the model runs as it was given: %s", run, loop.compiled.why_given)
    by_itself = run.strip().lower() == "auto"
    tier = None if by_itself else parse(run)
    if os.environ.get("HOTLOOP_DISABLE", "").strip().lower() not in ("", "0", "false", "no"):
        loop.decided(f"HOTLOOP_DISABLE={os.environ['HOTLOOP_DISABLE']} is set: steps run eager", {})
        return Tier("eager")
    if tier is None:
        return None
    if loop.compiled.given and tier.base != "as-given":
        tier = Tier("as-given", tier.graph)
    elif tier.base == "as-given" and not loop.compiled.given:
        tier = Tier("eager", tier.graph)
    if tier.graph and loop.engine is None:
        raise ConfigError(
            f"run {run!r}: whole steps can be captured on a GPU only, and the model is on {loop.device}; "
            f"without a graph: run={tier.without_graph().name!r}"
        )
    if tier.graph and tier.makes_kernels and loop.engine is not None and not loop.engine.kernels:
        raise ConfigError(
            f"run {run!r}: captured_step_emulation() replays torch's operations, and not the kernels that Inductor "
            "makes: of compiled code run='aot_eager+graph' can be captured under it, on a GPU all of it"
        )
    return tier


def agree_with_peers(loop: Loop) -> None:
    """In several processes a tier is agreed: what they could not agree on is left out, and said."""
    if loop.peers is None:
        return
    several = f"torch.distributed runs {loop.peers.size} processes"
    loop.sentinel = 0.0  # it runs a step twice whenever one process thinks it time
    if loop.auto is not None:
        loop.decided(f"run='auto': {several}, each with times of its own: steps run {loop.given}; name a tier", {})
        loop.auto, loop.asked = None, Tier(loop.given)
    flat = any(sharded_flat(one) for one in loop.holdings.modules.values())
    if loop.asked.compiles and (flat or any(hasattr(one, "placements") for one in loop.parameters())):
        how = "FSDP1" if flat else "FSDP2"
        why = f"parameters are sharded ({how}), and a proof cannot exchange them: hotloop.compile the model instead"
        loop.decided(f"{loop.asked.name}: {why}", {})
        loop.asked = Tier(loop.given)
    if loop.asked.graph:
        loop.decided(f"{loop.asked.name}: {several}: steps with collectives are not captured", {})
        loop.asked = loop.asked.without_graph()
    if loop.asked.compiles:  # else nothing is agreed, and one process may have a loop alone
        loop.peers.meet()
