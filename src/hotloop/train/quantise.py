"""Searched settings of which each value is compiled anew: how many trials share code, and a word where few do.

Pure arithmetic over a search space, for `hotloop hpo`: a dropout probability, say, is a constant of the compiled code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

MANY = 8
"""Values of one setting, at most, for which nothing is said."""


class Varies(Protocol):
    """A setting that varies in a search; ``kind`` is ``log``, ``float``, ``int`` or ``choices``."""

    @property
    def name(self) -> str:
        """Its dotted name."""

    @property
    def kind(self) -> str:
        """How it varies."""

    @property
    def values(self) -> tuple[Any, ...]:
        """The ends of a range, both included, or the choices."""

    def distinct(self) -> int | None:
        """Count its values; None where there is no end of them."""


def shared_runs(varied: Iterable[Varies], trials: float) -> float:
    """Return how many of so many trials will use the same compiled code, at least 1.

    Args:
        varied: the settings that vary and of which each value is compiled anew.
        trials: that are left, the coming one included.
    """
    kinds = math.prod(one.distinct() or trials for one in varied)
    return max(1.0, trials / max(1.0, kinds))


def warnings(varied: Iterable[Varies], trials: int) -> list[str]:
    """Say of each setting that makes many values what that costs, and how to have fewer.

    Args:
        varied: the settings that vary and of which each value is compiled anew.
        trials: of the search.
    """
    found = []
    for one in varied:
        count = one.distinct()
        made = trials if count is None else min(count, trials)
        if made > MANY:
            found.append(
                f"hpo.space.{one.name} makes up to {made:,} values in {trials:,} trials, and each of them is compiled "
                f"anew where trials are compiled (none runs eager for that). Fewer values share code: give it choices, "
                "or a range with a step"
            )
    return found
