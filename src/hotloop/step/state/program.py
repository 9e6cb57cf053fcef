"""One decorated step as state and proofs see it: its function, what it changes, where it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.step.state.rng_usage import RngUsage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.step.state.holdings import Holdings

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a step belongs to: its function, what it changes, where it runs."""

    step: Callable[..., Any]
    holdings: Holdings
    device: torch.device
    compiled: Callable[[], bool]
    """Tells whether compiled code is in force."""
    ignore: tuple[Any, ...] = ()
    """Objects of hotloop's own that the step may reach: the loop itself."""
    rng_usage: RngUsage = dataclasses.field(default_factory=RngUsage)
    """Which random streams it was seen to draw from."""
