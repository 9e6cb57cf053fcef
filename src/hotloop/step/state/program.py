"""A decorated step as state and proofs see it: its function, what it changes, and where it runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop.step.state.memory_limit import Room
from hotloop.step.state.rng_usage import RngUsage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.step.state.holdings import Holdings

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call."""


class Ran:
    """How far a call of the step has come: what is left to do where hotloop itself fails amid it.

    Attributes:
        state: what the step has returned, in a tuple; an empty one where nothing has run, or what ran was undone; None
            where the step was left half done.
    """

    def __init__(self) -> None:
        self.state: tuple[Any, ...] | None = ()
        self._raised = 0
        self.function: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Begin another call."""
        self.state, self._raised = (), 0

    def follow(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the step, followed as it runs."""
        self.function = function

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.state = None
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self.raised(error)
                raise
            self.state = (result,)
            return result

        return step

    def raised(self, error: BaseException) -> None:
        """Note an exception of the user's: it is not held, since its frames hold what the step has made."""
        self._raised = id(error)

    def is_users(self, error: BaseException) -> bool:
        """Return whether an exception came out of the step."""
        return id(error) == self._raised


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
    ran: Ran = dataclasses.field(default_factory=Ran)
    """How far a call has come, where ``step`` is followed."""
    room: Room = dataclasses.field(default_factory=Room)
    """The device memory that proofs may take."""

    @property
    def function(self) -> Callable[..., Any]:
        """The step as its author wrote it."""
        return self.ran.function or self.step
