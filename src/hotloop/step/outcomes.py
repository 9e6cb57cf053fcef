"""What a proof step came to: its tensors compared by kind, and what several such steps mean together."""

from __future__ import annotations

import dataclasses
import statistics
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop import measure
from hotloop.measure import BLIND, Limits, against, differences
from hotloop.measure.limits import SPREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hotloop.measure import Comparison, Difference

_T = TypeVar("_T")
_HOPELESS = 8.0
"""So many times its limit no tensor of a right tier is off, at any step."""

_ROUGH = 1e-4
"""A gradient that two runs of the same kernels leave so far apart, relative to itself, is rounding in some elements."""
_OF_UPDATE = 10.0
"""How many times as far apart the optimizer's steps are, relative to themselves: of an element a hundredth as large as
the typical one Adam, which divides by its own size and keeps nine tenths of its mean, makes ten times as much."""
_HALF = 0.5
_FEW = 16
"""Elements of a tensor whose own step may be next to nothing by chance."""
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
) -> dict[str, Comparison]:
    """Compare what two ways made of one step, one kind of tensor at a time: limits follow a kind's own medians.

    Args:
        ours: eager's values, named by `hotloop.step.proof.values_of`.
        theirs: the candidate's.
        start: the parameters before the step, to compare their updates; of a recording only where gradients are
            `rough`. Empty where there is nothing to update.
        limits: how far the two may be apart.
        spread: how far eager is from itself, by tensor.
        wide: the values of the step in more bits.
        scalars: relative errors of an optimizer's scalars, by key.
        draws: how far other roundings of eager's step are from it, in place of ``wide`` and ``spread``.
    """
    compiled = limits.compute_dtype is not None
    by_kind = [_by_kind(side) for side in (ours, theirs, wide or {})]
    spreads, of_draws = _by_kind(spread or {}), [_by_kind(draw) for draw in draws]
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
            found[kind] = _held(beyond, one, other, of_kind, spread=spreads.get(kind), drawn=drawn)
    if not compiled and start and "gradient" in found:
        found |= _with_room_for_rounding(found, ours, start, spreads)
    return found


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
        return measure.beside_roundings(ours, theirs, limits, drawn)
    return against(beyond, ours, theirs, limits, spread=spread)


def rough(spread: Mapping[str, Difference] | None) -> dict[str, float]:
    """Give the parameters whose gradients are so far from themselves that the optimizer may make other steps of them.

    Adam divides a gradient by its own size, so of one that is rounding (of the bias of scores that are only compared)
    it makes a full step in any direction, which no repeat of the step tells the size of. The gradients themselves are
    judged, and so is the optimizer, by the parameters that have no room for half of their step: where these are fewer,
    there is no telling rounding from a fault, and none is given.

    Args:
        spread: how far eager is from itself, by tensor.

    Returns:
        how far each's gradient is, relative to itself.
    """
    gradients = [one for name, one in (spread or {}).items() if kind_of(name) == "gradient"]
    found: dict[str, float] = {}
    for one in gradients:
        if (apart := one.relative or 0.0) > _ROUGH:
            found[_parameter_of(one.name)] = max(apart, found.get(_parameter_of(one.name), 0.0))
    free = [name for name, apart in found.items() if SPREADS * _OF_UPDATE * apart > _HALF]
    return found if 2 * len(free) <= len({_parameter_of(one.name) for one in gradients}) else {}


def _with_room_for_rounding(
    found: Mapping[str, Comparison],
    ours: Mapping[str, torch.Tensor | None],
    start: Mapping[str, torch.Tensor],
    spreads: Mapping[str, Mapping[str, Difference]],
) -> dict[str, Comparison]:
    """Judge what an optimizer makes of gradients that are rounding by what it added to these in the reference.

    A parameter has room for a part of its step, by how much of its gradient is rounding; a mean of gradients or of
    their squares for what the gradient's own noise makes of it. Kinds that repeat exactly (counts of steps) have none.

    Returns:
        the comparisons of parameters and of optimizer state, by kind; empty where no gradient is rough.
    """
    noise = rough(spreads.get("gradient"))
    if not noise:
        return {}
    moved = differences(start, {name: ours[name] for name in start if name in ours})[0]
    usual = statistics.median([each for one in moved.values() if (each := one.rms_difference) > 0] or [0.0])
    apart: dict[str, float] = {}
    for one in found["gradient"].differences.values():
        of, by = _parameter_of(one.name), noise.get(_parameter_of(one.name), 0.0)
        apart[of] = max(apart.get(of, 0.0), by * one.rms * max(1.0, (1 + by) * one.rms))
    judged = {}
    for kind in [kind for kind in found if kind.startswith(("parameter", "optimizer"))]:
        if not any(one.rms_difference > 0 for one in spreads.get(kind, {}).values()):
            continue
        rooms = {}
        for name, one in found[kind].differences.items():
            if (of := _parameter_of(name)) not in noise:
                continue
            if kind == "parameter":
                step = moved[name].rms_difference if name in moved else 0.0
                rooms[name] = (
                    SPREADS * min(1.0, _OF_UPDATE * noise[of]) * (max(step, usual) if one.numel < _FEW else step)
                )
            else:
                rooms[name] = SPREADS * apart.get(of, 0.0)
        judged[kind] = measure.with_room(found[kind], rooms)
    return judged


def _parameter_of(name: str) -> str:
    """Give the parameter that a tensor of `values_of` belongs to."""
    name = name.removeprefix("gradient of ").removeprefix("optimizer state of ").removeprefix("parameter ")
    return name.removesuffix(" at the optimizer step").partition(": ")[0]


def _by_kind(values: Mapping[str, _T]) -> dict[str, dict[str, _T]]:
    """Tell kinds apart: gradients may be thousands of times as noisy as the parameters that they move."""
    found: dict[str, dict[str, _T]] = {}
    for name, one in values.items():
        found.setdefault(kind_of(name), {})[name] = one
    return found


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
    (`hotloop.measure.that_stays`).
    """
    noisy = any(one.rms_difference > 0 for one in spread.values())
    spreads = _by_kind(spread)

    def join(kind: str, comparisons: Sequence[Comparison]) -> Comparison:
        now = [measure.with_spread(one, spreads.get(kind, {})) for one in comparisons]
        return measure.that_stays(now, most=_HOPELESS) if noisy else measure.over_steps(now)

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
