"""What a proof step came to: its tensors compared by kind, and what several such steps mean together."""

from __future__ import annotations

import dataclasses
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop import measure
from hotloop.measure import BLIND, Limits, compare_with_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference, Mismatch

_T = TypeVar("_T")
_HOPELESS = 8.0
"""So many times its limit no tensor of a right tier is off, at any step."""

OF_COMPILED = ("result", "gradient", "buffer")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One proof step.

    Args:
        result: what the reference returned.
        comparisons: by kind of tensor, since limits follow a kind's own medians.
        nbytes: how much memory the copies took.
        on_host: the copies did not fit on the GPU.
        random_moved: random streams that the two left at different positions.
        failed: why the two could not be compared; the step itself is done.
    """

    result: Any
    comparisons: dict[str, Comparison]
    nbytes: int
    on_host: bool
    random_moved: tuple[str, ...] = ()
    failed: str = ""

    @property
    def agrees(self) -> bool:
        """Tell whether values and random positions agree."""
        return all(one.agrees for one in self.comparisons.values()) and not self.random_moved and not self.failed

    @property
    def hopeless(self) -> bool:
        """Tell whether no further step can make it agree: it is past its limits by far, or not comparable at all."""
        if self.random_moved or self.failed:
            return True
        return any(
            not one.agrees and (one.nearness > _HOPELESS or not one.may_be_rounding)
            for one in self.comparisons.values()
        )

    @property
    def may_be_noise(self) -> bool:
        """Tell whether all that disagrees are numbers, as kernels make them that are not deterministic."""
        numbers = all(one.may_be_rounding for one in self.comparisons.values())
        return numbers and not self.random_moved and not self.failed

    @property
    def undecided(self) -> bool:
        """Tell whether nothing speaks against the two but that rounding leaves nothing to tell by."""
        failures = [each for one in self.comparisons.values() for each in one.failures]
        return bool(failures) and all(each.measure == BLIND for each in failures)

    @property
    def why(self) -> str:
        """Say in one line what does not agree."""
        if self.failed:
            return f"the comparison failed: {self.failed}"
        if self.random_moved:
            return f"another position of {', '.join(self.random_moved)} after the step"
        return "; ".join(str(one) for one in self.comparisons.values() if not one.agrees)

    @property
    def worst(self) -> str:
        """Say which tensor is nearest to its limit, and how near."""
        nearest = max(self.comparisons.values(), key=lambda one: one.nearness, default=None)
        if nearest is None or nearest.worst is None:
            return "all equal"
        return f"{nearest.worst.name}, at {nearest.nearness:.0%} of its limit"


def compare_kinds(  # noqa: PLR0913, PLR0917 - two sides, what they began with, and how far they may be apart
    ours: dict[str, torch.Tensor | None],
    theirs: dict[str, torch.Tensor | None],
    start: dict[str, torch.Tensor],
    limits: Limits,
    spread: Mapping[str, Difference] | None,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    scalars: Mapping[str, float] = MappingProxyType({}),
    draws: Sequence[Mapping[str, Difference]] = (),
    same_gradients: Mapping[str, Difference] = MappingProxyType({}),
) -> dict[str, Comparison]:
    """Compare what two ways made of one step, one kind of tensor at a time: limits follow a kind's own medians.

    Args:
        ours: eager's values, named by `hotloop.step.prove.proof.values_of`.
        theirs: the candidate's.
        start: the parameters before the step, to compare their updates; compiled code's only.
        limits: how far the two may be apart.
        spread: how far eager is from itself, by tensor.
        wide: the values of the step in more bits.
        scalars: relative errors of an optimizer's scalars, by key.
        draws: how far other roundings of eager's step are from it, in place of ``wide`` and ``spread``.
        same_gradients: how far parameters and optimizer state of a recording are from what eager's optimizer makes of
            the recording's own gradients (of parameters that `Survey.updated` names); these are judged by that.
    """
    compiled = limits.compute_dtype is not None
    by_kind = [_by_kind(side) for side in (ours, theirs, wide or {})]
    spreads, own_steps, of_draws = _by_kind(spread or {}), _by_kind(same_gradients), [_by_kind(draw) for draw in draws]
    found: dict[str, Comparison] = {}
    for kind in dict.fromkeys((*by_kind[0], *by_kind[1])):
        one, other, beyond = (side.get(kind, {}) for side in by_kind)
        drawn = [draw.get(kind, {}) for draw in of_draws]
        if compiled and kind == "parameter" and not start:
            continue
        if compiled and kind == "parameter":
            found["update"] = _held(
                beyond, updates_of(one, start), updates_of(other, start), limits.of_updates(), drawn=drawn
            )
        elif not compiled or kind in OF_COMPILED:
            of_kind = dataclasses.replace(limits, scalars=scalars.get(kind.rpartition(" ")[2], 0.0))
            known = own_steps.get(kind, {})
            one, other = ({name: each for name, each in side.items() if name not in known} for side in (one, other))
            held = _held(beyond, one, other, of_kind, spread=spreads.get(kind), drawn=drawn)
            found[kind] = held.with_same_gradients(known, of_kind) if known else held
    return found


def judge_kinds(
    found: Mapping[str, Difference], mismatches: Sequence[Mismatch], limits: Limits
) -> dict[str, Comparison]:
    """Judge by kind, as compiled code is, how far two runs of eager's were found to be apart.

    Args:
        found: by tensor, named by `hotloop.step.prove.proof.values_of`.
        mismatches: what could not be measured.
        limits: of compiled code.
    """
    differing = _by_kind(found)
    unlike = _by_kind({one.name: one for one in mismatches})
    return {
        kind: measure.judge(differing.get(kind, {}), list(unlike.get(kind, {}).values()), limits)
        for kind in OF_COMPILED
        if kind in differing or kind in unlike
    }


def _held(  # noqa: PLR0913 - two sides, and all that tells how far they may be apart
    beyond: Mapping[str, torch.Tensor | None],
    ours: Mapping[str, torch.Tensor | None],
    theirs: Mapping[str, torch.Tensor | None],
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
    drawn: Sequence[Mapping[str, Difference]],
) -> Comparison:
    if drawn:
        return measure.compare_with_roundings(ours, theirs, limits, drawn)
    return compare_with_reference(beyond, ours, theirs, limits, spread=spread)


def _by_kind(values: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Tell kinds apart: gradients may be thousands of times as noisy as the parameters that they move."""
    found: dict[str, dict[str, _T]] = {}
    for name, one in values.items():
        found.setdefault(kind_of(name), {})[name] = one
    return found


@functools.lru_cache(1 << 14)
def kind_of(name: str) -> str:
    """Give the kind of tensor that a name is of; kinds of optimizer state are told apart by their key."""
    first = name.partition(" ")[0].partition("[")[0].partition(".")[0]
    return f"{first} {name.rpartition(': ')[2]}" if first == "optimizer" else first


def updates_of(side: dict[str, torch.Tensor | None], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Give what a step added to each parameter, by the parameter's name."""
    return {
        name: None if one is None else one.to(start[name].device) - start[name]
        for name, one in side.items()
        if name in start
    }


def over_steps(outcomes: Sequence[Outcome], *, scatter: bool = False) -> Outcome:
    """Join the outcomes of several steps into one, as `hotloop.measure.over_steps` does."""
    return _joined(outcomes, lambda _, comparisons: measure.over_steps(comparisons, scatter=scatter))


def verdict(outcomes: Sequence[Outcome], spread: Mapping[str, Difference]) -> Outcome:
    """Join the outcomes of several steps of a recording, by what is known by now of how far eager is from itself.

    Where eager repeats itself exactly, no step may be past a limit; else what does not stay is noise
    (`hotloop.measure.over_noisy_steps`).
    """
    noisy = any(one.rms_difference > 0 for one in spread.values())
    spreads = _by_kind(spread)

    def join(kind: str, comparisons: Sequence[Comparison]) -> Comparison:
        now = [one.with_spread(spreads.get(kind, {})) for one in comparisons]
        return measure.over_noisy_steps(now, most=_HOPELESS) if noisy else measure.over_steps(now)

    return _joined(outcomes, join)


def _joined(outcomes: Sequence[Outcome], join: Callable[[str, Sequence[Comparison]], Comparison]) -> Outcome:
    last = outcomes[-1]
    kinds = dict.fromkeys(kind for one in outcomes for kind in one.comparisons)
    joined = {
        kind: join(kind, [one.comparisons[kind] for one in outcomes if kind in one.comparisons]) for kind in kinds
    }
    moved = tuple(dict.fromkeys(name for one in outcomes for name in one.random_moved))
    failed = next((one.failed for one in outcomes if one.failed), "")
    return dataclasses.replace(last, comparisons=joined, random_moved=moved, failed=failed)
