"""What one of several processes wants all to leave, of the tiers that `auto` chooses among, until they leave it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from hotloop.step.tiers import NAMED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.step.obstacle import Obstacle


class Wishes:
    """The tiers that this process wants all to leave, and why; told in votes on calls in such a tier, or captured ones.

    Attributes:
        by_name: the reason, by the name of the tier.
        granted: all processes leave, in this call, the tier that is reported as failed.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Obstacle] = {}
        self.granted = False

    def number(self) -> int:
        """Return the number of a tier to leave, for a vote in which the lowest counts; 0 for none."""
        return min((-1 - NAMED.index(name) for name in self.by_name), default=0)

    @staticmethod
    def named(number: int) -> str:
        """Return the name of the tier that a vote has come to; empty where it is none."""
        return NAMED[-1 - number] if number else ""

    @contextlib.contextmanager
    def granting(self) -> Iterator[None]:
        """Report in the block that a tier failed which all processes leave in this call."""
        self.granted = True
        try:
            yield
        finally:
            self.granted = False
