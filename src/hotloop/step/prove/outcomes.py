"""The outcome of a proof step: its tensors compared by kind; and the joint outcome of several such steps."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop import measure
from hotloop.measure import ALL, RATIO, compare_with_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference, Limits, Mismatch, Score

_T = TypeVar("_T")
STEPS = 3
"""Consecutive steps on which a candidate must agree."""
_FAR, _KINK = 8.0, 1e4
"""A tensor of a right tier is never off by this many times its limit; by the other number where a ReLU flips."""
OF_COMPILED = ("result", "gradient", "buffer")


class Verdict(enum.Enum):
    """What the proof steps so far say of a candidate."""

    PROVEN = enum.auto()
    MORE = enum.auto()
    """More steps have to be compared."""
    CLOSER = enum.auto()
    """The next steps are compared more closely: in more bits, or by another measurement of noise."""
    WRONG = enum.auto()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one proof step.

    Args:
        result: the value that the reference returned.
        comparisons: by kind of tensor, since limits follow a kind's own medians.
        nbytes: bytes of memory that the copies took.
        on_host: the copies did not fit on the GPU.
        random_moved: random streams that the two runs left at different positions.
        failed: why the two runs could not be compared; the step itself is done.
    """

    result: Any
    comparisons: dict[str, Comparison]
    nbytes: int
    on_host: bool
    random_moved: tuple[str, ...] = ()
    failed: str = ""

    @property
    def agrees(self) -> bool:
        """Whether values and random positions agree."""
        return all(one.agrees for one in self.comparisons.values()) and not self.random_moved and not self.failed

    @property
    def far_off(self) -> bool:
        """Whether it differs by more than a right tier does at any step, or in another way."""
        scores = [score for one in self.comparisons.values() for score in one.scores if score.name != ALL]
        return not self.may_be_noise or any(map(_is_far, scores))

    @property
    def may_be_noise(self) -> bool:
        """Whether only numbers disagree, in a way that kernels which are not deterministic could cause."""
        numbers = all(one.may_be_rounding for one in self.comparisons.values())
        return numbers and not self.random_moved and not self.failed

    @property
    def why(self) -> str:
        """What does not agree, in one line."""
        if self.failed:
            return f"the comparison failed: {self.failed}"
        if self.random_moved:
            return f"another position of {', '.join(self.random_moved)} after the step"
        return "; ".join(str(one) for one in self.comparisons.values() if not one.agrees)

    @property
    def worst(self) -> str:
        """The tensor that is nearest to its limit, and how near."""
        nearest = max(self.comparisons.values(), key=lambda one: one.nearness, default=None)
        if nearest is None or nearest.worst is None:
            return "all equal"
        return f"{nearest.worst.name}, at {nearest.nearness:.0%} of its limit"


def _is_far(score: Score) -> bool:
    return score.nearness > (_KINK if score.measure in {"residual", RATIO} else _FAR)


def compare_kinds(  # noqa: PLR0913, PLR0917 - two sides, their common start, and how far they may be apart
    ours: dict[str, torch.Tensor | None],
    theirs: dict[str, torch.Tensor | None],
    start: dict[str, torch.Tensor],
    limits: Limits,
    spread: Mapping[str, Difference] | None,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    same_gradients: Mapping[str, Difference] = MappingProxyType({}),
) -> dict[str, Comparison]:
    """Compare the values that two runs of one step produced, by kind of tensor: limits follow a kind's own medians.

    Args:
        ours: eager's values, named by `hotloop.step.prove.proof.values_of`.
        theirs: the candidate's values.
        start: the parameters before the step, to compare their updates; needed for compiled code only.
        limits: how far the two may be apart.
        spread: the difference of eager from itself, by tensor.
        wide: the values of the step in more bits.
        same_gradients: the difference of a recording's parameters and optimizer state from the values that its
            optimizer computes eagerly from the recording's own gradients; these are judged by that.
    """
    compiled = limits.compute_dtype is not None
    mine, others, beyond = (_by_kind(side) for side in (ours, theirs, wide or {}))
    spreads, own_steps = _by_kind(spread or {}), _by_kind(same_gradients)
    found: dict[str, Comparison] = {}
    one: Mapping[str, torch.Tensor | None]
    other: Mapping[str, torch.Tensor | None]
    for kind in dict.fromkeys((*mine, *others)):
        one, other, reference = mine.get(kind, {}), others.get(kind, {}), beyond.get(kind, {})
        if compiled and kind == "parameter" and start:
            # Adam makes a full step of a gradient that is all rounding, and such gradients are judged by themselves.
            rounding = _rounding(found.get("gradient"))
            begun = {name: value for name, value in start.items() if name not in rounding}
            updates = Updates(one, begun), Updates(other, begun)
            found["update"] = compare_with_reference(reference, *updates, limits.of_updates())
        elif not compiled or kind in OF_COMPILED:
            known = own_steps.get(kind, {})
            one, other = ({name: each for name, each in side.items() if name not in known} for side in (one, other))
            held = compare_with_reference(reference, one, other, limits, spread=spreads.get(kind))
            found[kind] = held.with_same_gradients(known, limits) if known else held
    return found


def _rounding(gradients: Comparison | None) -> set[str]:
    """Name the parameters, as `compare_kinds` does, whose gradient is small, and so unlike eager's as rounding is."""
    if gradients is None:
        return set()
    small = [name for name in gradients.below_floor if gradients.differences[name].unrelated]
    return {f"parameter {parameter_of(name)}" for name in small}


def parameter_of(gradient: str) -> str:
    """Return the name of the parameter that a gradient is named for by `hotloop.step.prove.proof.values_of`."""
    return gradient.removeprefix("gradient of ").removesuffix(" at the optimizer step")


def judge_kinds(
    found: Mapping[str, Difference], mismatches: Sequence[Mismatch], limits: Limits
) -> dict[str, Comparison]:
    """Judge the differences between two eager runs by kind, with the limits of compiled code.

    Args:
        found: by tensor, named by `hotloop.step.prove.proof.values_of`.
        mismatches: tensors whose difference could not be measured.
        limits: the limits of compiled code.
    """
    differing = _by_kind(found)
    unlike = _by_kind({mismatch.name: mismatch for mismatch in mismatches})
    return {
        kind: measure.judge(differing.get(kind, {}), list(unlike.get(kind, {}).values()), limits)
        for kind in OF_COMPILED
        if kind in differing or kind in unlike
    }


def _by_kind(values: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Group values by kind: gradients may be thousands of times as noisy as the parameters that they move."""
    found: dict[str, dict[str, _T]] = {}
    for name, value in values.items():
        found.setdefault(kind_of(name), {})[name] = value
    return found


@functools.lru_cache(1 << 14)
def kind_of(name: str) -> str:
    """Return the kind of tensor that a name belongs to; each key of optimizer state is a kind of its own."""
    first = name.partition(" ")[0].partition("[")[0].partition(".")[0]
    return f"{first} {name.rpartition(': ')[2]}" if first == "optimizer" else first


class Updates(collections.abc.Mapping[str, "torch.Tensor | None"]):
    """The change of each parameter in a step, by the parameter's name: computed lazily, not cached.

    Args:
        side: the parameters after the step, by the names of `hotloop.step.prove.proof.values_of`.
        start: the parameters before the step.
    """

    def __init__(self, side: Mapping[str, torch.Tensor | None], start: Mapping[str, torch.Tensor]) -> None:
        self._after, self._start = {name: value for name, value in side.items() if name in start}, start

    def __getitem__(self, name: str) -> torch.Tensor | None:
        value, start = self._after[name], self._start[name]
        return None if value is None else value.to(start.device) - start

    def __contains__(self, name: object) -> bool:
        return name in self._after

    def __iter__(self) -> Iterator[str]:
        return iter(self._after)

    def __len__(self) -> int:
        return len(self._after)


def over_steps(outcomes: Sequence[Outcome]) -> Outcome:
    """Join the outcomes of several steps into one, as `hotloop.measure.over_steps` does."""
    return _joined(outcomes, lambda _, comparisons: measure.over_steps(comparisons))


def verdict(outcomes: Sequence[Outcome], spread: Mapping[str, Difference]) -> Outcome:
    """Join the outcomes of several steps of a recording, with the latest spread of eager from itself.

    If eager repeats itself exactly, no step may be past a limit. Otherwise a difference that does not persist is noise
    (`hotloop.measure.over_noisy_steps`).
    """
    noisy = any(one.rms_difference > 0 for one in spread.values())
    spreads = _by_kind(spread)

    def join(kind: str, comparisons: Sequence[Comparison]) -> Comparison:
        now = [one.with_spread(spreads.get(kind, {})) for one in comparisons]
        return measure.over_noisy_steps(now, most=_FAR) if noisy else measure.over_steps(now)

    return _joined(outcomes, join)


def _joined(outcomes: Sequence[Outcome], join: Callable[[str, Sequence[Comparison]], Comparison]) -> Outcome:
    kinds = dict.fromkeys(kind for one in outcomes for kind in one.comparisons)
    joined = {
        kind: join(kind, [one.comparisons[kind] for one in outcomes if kind in one.comparisons]) for kind in kinds
    }
    moved = tuple(dict.fromkeys(name for one in outcomes for name in one.random_moved))
    failed = next((one.failed for one in outcomes if one.failed), "")
    return dataclasses.replace(outcomes[-1], comparisons=joined, random_moved=moved, failed=failed)


def without_result(outcome: Outcome) -> Outcome:
    """Return an outcome without the comparison of what compiled code returned, unless NaN or infinity is in it.

    The smaller a loss, the more of it is rounding, and without a reference in more bits nobody knows how much. The
    gradients are judged in any case.
    """
    result = outcome.comparisons.get("result")
    if result is None or any(failure.measure == "finite" for failure in result.failures):
        return outcome
    others = {kind: comparison for kind, comparison in outcome.comparisons.items() if kind != "result"}
    return dataclasses.replace(outcome, comparisons=others)
