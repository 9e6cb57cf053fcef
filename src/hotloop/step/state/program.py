"""A decorated step as state and proofs see it: its function, what it changes, and where it runs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.step.state.memory_limit import Room
from hotloop.step.state.rng_usage import RngUsage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.step.state.holdings import Holdings

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that a step belongs to: its function, what the step changes, and where it runs."""

    step: Callable[..., Any]
    holdings: Holdings
    device: torch.device
    compiled: Callable[[], bool]
    """Returns whether compiled code is in force."""
    ignore: tuple[Any, ...] = ()
    """Objects of hotloop's own that the step may reach: the loop itself."""
    rng_usage: RngUsage = dataclasses.field(default_factory=RngUsage)
    """The random streams that the step was seen to draw from."""
    room: Room = dataclasses.field(default_factory=Room)
    """The device memory that proofs may take."""
