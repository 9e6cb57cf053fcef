"""Searched settings of which each value is compiled anew: how many trials share code, and fewer values to offer.

Pure arithmetic over a search space, for `hotloop hpo`: a dropout probability, say, is a constant of the compiled code.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

MANY = 8
"""Values of one setting, at most, for which nothing is said."""
_OFFERED = 6
"""Values that are offered instead, at most."""
_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


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
    """Say of each setting that makes many values what that costs, and offer fewer.

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
                f"anew where trials are compiled (none runs eager for that). Fewer values share code: {offer(one)}"
            )
    return found


def offer(one: Varies) -> str:
    """Return the setting with at most six values, in the words of the space."""
    if one.kind == "choices":
        step = (len(one.values) - 1) / (_OFFERED - 1)
        return (
            f"hpo.space.{one.name}={{choices: {_list(one.values[round(step * place)] for place in range(_OFFERED))}}}"
        )
    low, high = float(one.values[0]), float(one.values[1])
    if one.kind == "log":
        ratio = (high / low) ** (1 / (_OFFERED - 1))
        between = [float(f"{low * ratio**place:.2g}") for place in range(1, _OFFERED - 1)]
        return f"hpo.space.{one.name}={{choices: {_list(dict.fromkeys((low, *between, high)))}}}"
    step = _step(high - low, whole=one.kind == "int")
    # A range whose width is no multiple of the step would not reach its upper end.
    top = low + step * math.floor((high - low) / step + 1e-9)
    return f"hpo.space.{one.name}={{{one.kind}: {_list((low, top))}, step: {_number(step)}}}"


def _step(width: float, *, whole: bool) -> float:
    """Return the least round step that makes no more values than are offered; prefer one that reaches the upper end."""
    least = width / (_OFFERED - 1)
    power = 10.0 ** math.floor(math.log10(least))
    steps = [factor * power * scale for scale in (1, 10) for factor in _ROUND]
    steps = sorted({round(step) if whole else step for step in steps if step >= least * (1 - 1e-9)} - {0})
    even = [step for step in steps if step <= width and abs(width / step - round(width / step)) < 1e-6]  # noqa: PLR2004 - rounding
    return even[0] if even and even[0] <= 2 * steps[0] else steps[0]


def _list(values: Iterable[Any]) -> str:
    return f"[{', '.join(map(_number, values))}]"


def _number(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)
