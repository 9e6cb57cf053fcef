"""A decorated step as state and proofs see it: its function, what it changes, and where it runs."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from hotloop._torch.hooks import calls_hooks
from hotloop.step.state.memory_limit import Room
from hotloop.step.state.rng_usage import RngUsage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from hotloop.step.state.holdings import Holdings

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of one call."""
_USERS = "_hotloop_from_the_step"
"""The attribute of an exception that came out of a step; an ``id`` would soon be that of another exception."""


class Ran:
    """How far a call of the step has come: what is left to do where hotloop itself fails amid it.

    Attributes:
        state: what the step has returned, in a tuple; an empty one where nothing has run, or what ran was undone; None
            where the step was left half done.
    """

    def __init__(self) -> None:
        self.state: tuple[Any, ...] | None = ()
        self.function: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Begin another call."""
        self.state = ()

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
        """Mark an exception as the user's. It is not held: its frames hold what the step has made."""
        vars(error)[_USERS] = True  # past a class that refuses to set attributes

    def is_users(self, error: BaseException) -> bool:
        """Return whether an exception came out of the step."""
        return _USERS in vars(error)


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


class WriteWatch:
    """A watch for the first optimizer step since the step began: from then on the step cannot be undone.

    ``ever`` says whether an optimizer has stepped at all; ``tell`` is called with each, before it steps.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        watched = list(optimizers)
        hooked = [one for one in watched if calls_hooks(one)]
        self.begun, self.ever = False, len(hooked) < len(watched)
        self.tell: Callable[[torch.optim.Optimizer], None] | None = None
        self._handles = [one.register_step_pre_hook(self._began) for one in hooked]

    def _began(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.begun = self.ever = True
        if self.tell is not None:
            self.tell(optimizer)

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
