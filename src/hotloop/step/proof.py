"""Proving a tier on real steps: the same step, from the same state, run both ways and compared.

A proof step is a training step like any other. The candidate runs first; then everything that it changed is put back,
its values kept, and the reference runs, whose outcome stays. So nothing is trained twice, and a candidate that is wrong
has changed nothing. It takes one copy of the state: what the candidate made of it and what was there before are
exchanged in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop import measure
from hotloop.fallback.causes import describe
from hotloop.measure import Limits, against, differences, flatten
from hotloop.measure.tree import names
from hotloop.step.captured import Program, gradients_of
from hotloop.step.holdings import RandomState, Snapshot
from hotloop.step.optimizers import rounded_scalars
from hotloop.step.undo import BufferTables, StepStart, overlaps

if TYPE_CHECKING:
    from hotloop.measure import Comparison, Difference
    from hotloop.step.holdings import Holdings

STEPS = 3
"""Consecutive steps on which a candidate must agree."""
_HOPELESS = 8.0
"""So many times its limit no tensor of a right tier is off, at any step."""

_Made = TypeVar("_Made")
Run = Callable[[], tuple[Any, Mapping[str, torch.Tensor]]]
"""Runs a step; gives its result and the gradients that its optimizers found."""


class CandidateFailedError(Exception):
    """The candidate raised, ``__cause__`` being what; everything it did was undone, unless ``undone`` says no."""

    def __init__(self, *, undone: bool = True) -> None:
        super().__init__("the candidate of a proof failed")
        self.undone = undone


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


def prove_step(  # noqa: PLR0913 - two runs, what they change, and how far they may be apart
    program: Program,
    candidate: Run,
    reference: Run,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
    compare_random: bool = True,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    draws: Sequence[Mapping[str, Difference]] = (),
) -> Outcome:
    """Run one step both ways and compare: results, gradients, parameters, optimizer state, buffers, other state.

    Where the limits are those of compiled code, parameters are compared by their updates, and the optimizer's state is
    not: it follows from the gradients through code that is not compiled.

    Args:
        program: what the step changes.
        candidate: the tier to prove.
        reference: what it is proven against; its outcome stays.
        limits: how far the two may be apart.
        spread: how far the reference is from itself, by tensor, where its kernels are not deterministic.
        compare_random: whether both draw the same numbers from the same streams.
        wide: the same step in more bits (`hotloop.step.reference`), which both are held against besides.
        draws: what rounding does to the step (`hotloop.step.referred.roundings`), in place of ``wide`` and ``spread``.

    Raises:
        CandidateFailedError: the candidate raised, or the reference found no memory beside what is kept of the
            candidate. The step has not been run then: the state is as before.
        Exception: the reference raised, which is then the user's own error.
    """
    devices = [program.device]
    before, theirs, after = _candidate(program, candidate)
    start = _parameters(before.live, on_host=before.on_host) if limits.compute_dtype is not None else {}
    result, at_step = _beside(program, reference)
    moved = tuple(RandomState(devices).moved_since(after)) if compare_random else ()
    comparisons, failed = {}, ""
    try:
        ours = values_of(program.holdings, result, at_step)
        scalars = rounded_scalars(program.holdings.optimizers.values())
        comparisons = _compare(ours, theirs, start, limits, spread, wide, scalars, draws)
    except Exception as error:  # noqa: BLE001 - the step is done and right; that the tier is not known to be, is told
        failed = describe(error)
    return Outcome(result, comparisons, before.nbytes, before.on_host, moved, failed)


def _beside(program: Program, reference: Run) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run a reference beside the copies of a proof; where these are too much for the memory, the step has not begun."""
    at_start = StepStart(program.holdings, [program.device])
    try:
        at_start.save(gradients=True)
        return reference()
    except torch.OutOfMemoryError as error:
        if at_start.complete and at_start.wrote():
            raise
        if at_start.complete:
            at_start.restore()
        raise CandidateFailedError from error


class _Before(Snapshot):
    """What a step found, with the tensors that its buffers were."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.holdings, [program.device])
        self._buffers = BufferTables(program.holdings)
        for name in [name for name, one in self.live.items() if overlaps(one)]:
            del self.live[name], self.saved[name]  # an expanded buffer: torch lets nobody write into it, so not us

    def restore(self) -> None:
        super().restore()
        self._buffers.restore()

    def exchange(self) -> None:
        super().exchange()
        self._buffers.restore()


def undone_if_it_fails(program: Program, run: Callable[[], _Made]) -> tuple[_Made, Snapshot]:
    """Run something that eager would not; where it raises, the step has not begun. Gives what was there before, too.

    Also an interrupt undoes it, and passes: a capture on a GPU has executed nothing, but has left its gradients.

    Raises:
        CandidateFailedError: it raised.
    """
    try:
        before = _Before(program)
    except Exception as error:
        raise CandidateFailedError from error  # memory for the copy ran out, say: nothing has happened
    try:
        made = run()
        wait_for(program.device)  # a kernel's failure belongs to the code that launched it
    except BaseException as error:
        try:
            wait_for(program.device)  # what was launched on another stream must not write after what is put back
            before.restore()
        except Exception:  # noqa: BLE001 - a lost GPU is no place to put anything back to
            undone = False
        else:
            undone = True
        if isinstance(error, Exception):
            raise CandidateFailedError(undone=undone) from error
        raise
    return made, before


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _candidate(program: Program, run: Run) -> tuple[Snapshot, dict[str, torch.Tensor | None], RandomState]:
    """Run a candidate and undo it; gives the values that it left, and where its random streams were."""

    def values() -> tuple[dict[str, torch.Tensor | None], RandomState]:
        found = values_of(program.holdings, *run())
        return found, RandomState([program.device])

    (found, after), before = undone_if_it_fails(program, values)
    try:
        before.exchange()
    except Exception as error:
        raise CandidateFailedError(undone=False) from error  # half of the state is the candidate's
    return before, _as_left(found, before), after


def _parameters(live: Mapping[str, torch.Tensor], *, on_host: bool) -> dict[str, torch.Tensor]:
    found = {name: one for name, one in live.items() if name.startswith("parameter ")}
    return {name: one.cpu().clone() if on_host else one.clone() for name, one in found.items()}


def _compare(  # noqa: PLR0913, PLR0917 - two sides, what they began with, and how far they may be apart
    ours: dict[str, torch.Tensor | None],
    theirs: dict[str, torch.Tensor | None],
    start: dict[str, torch.Tensor],
    limits: Limits,
    spread: Mapping[str, Difference] | None,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    scalars: Mapping[str, float] = MappingProxyType({}),
    draws: Sequence[Mapping[str, Difference]] = (),
) -> dict[str, Comparison]:
    compiled = limits.compute_dtype is not None
    by_kind = [_by_kind(side) for side in (ours, theirs, wide or {})]
    found: dict[str, Comparison] = {}
    for kind in dict.fromkeys((*by_kind[0], *by_kind[1])):
        one, other, beyond = (side.get(kind, {}) for side in by_kind)
        drawn = [_of_kind(draw, kind) for draw in draws]
        if compiled and kind == "parameter" and not start:
            continue
        if compiled and kind == "parameter":
            found["update"] = _held(
                beyond, _updates(one, start), _updates(other, start), limits.of_updates(), drawn=drawn
            )
        elif not compiled or kind in _OF_COMPILED:
            of_kind = dataclasses.replace(limits, scalars=scalars.get(kind.rpartition(" ")[2], 0.0))
            found[kind] = _held(beyond, one, other, of_kind, spread=_of_kind(spread, kind), drawn=drawn)
    rounding = _all_rounding(found["gradient"]) if not compiled and "gradient" in found else set()
    for kind in [kind for kind in found if kind.startswith(("parameter", "optimizer"))] if rounding else ():
        mostly = {name for name in found[kind].differences if _parameter_of(name) in rounding}
        found[kind] = measure.without_numbers(found[kind], mostly)
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


def _all_rounding(gradients: Comparison) -> set[str]:
    """Name the parameters whose gradients are rounding and little else: of the bias of scores that are only compared.

    Adam divides a gradient by its own size, so of such a one it makes a full step in any direction, which no repeat of
    the step tells the size of. The gradients themselves are judged, and so is the optimizer, by the other parameters:
    where these are fewer, there is no telling rounding from a fault, and none is named.
    """
    apart = (one for one in gradients.differences.values() if (one.relative or 0.0) > _ROUNDING)
    found, known = {_parameter_of(one.name) for one in apart}, {_parameter_of(name) for name in gradients.differences}
    return found if 2 * len(found) <= len(known) else set()


def _of_kind(spread: Mapping[str, Difference] | None, kind: str) -> dict[str, Difference]:
    """Give the spread of a kind: gradients may be thousands of times as noisy as the parameters that they move."""
    return {name: one for name, one in (spread or {}).items() if _kind(name) == kind}


def _parameter_of(name: str) -> str:
    """Give the parameter that a tensor of `values_of` belongs to."""
    name = name.removeprefix("gradient of ").removeprefix("optimizer state of ").removeprefix("parameter ")
    return name.removesuffix(" at the optimizer step").partition(": ")[0]


def _by_kind(values: Mapping[str, torch.Tensor | None]) -> dict[str, dict[str, torch.Tensor | None]]:
    found: dict[str, dict[str, torch.Tensor | None]] = {}
    for name, one in values.items():
        found.setdefault(_kind(name), {})[name] = one
    return found


@dataclasses.dataclass(frozen=True)
class Made:
    """What one call of a step makes as eager runs it, kept so that several candidates can be held against it.

    Args:
        start: the parameters before the step.
        ours: eager's values, by name.
        wide: those of the step in more bits; None without a reference.
        spread: as `prove_step` takes it.
    """

    start: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor | None]
    wide: Mapping[str, torch.Tensor | None] | None = None
    spread: Mapping[str, Difference] | None = None


def kept(program: Program, run: Run, wide: Mapping[str, torch.Tensor | None] | None = None, **more: Any) -> Made:
    """Run a step eagerly and undo it; gives what it made.

    Raises:
        CandidateFailedError: it raised; the state is as before.
    """
    before, ours, _ = _candidate(program, run)
    start = _parameters(before.live, on_host=before.on_host)
    return Made(start, {name: one if one is None else one.detach().clone() for name, one in ours.items()}, wide, **more)


def held_against(program: Program, run: Run, made: Made, limits: Limits) -> dict[str, Comparison]:
    """Run a candidate from the state that ``made`` was made from, undo it, and compare, by kind of tensor.

    Raises:
        CandidateFailedError: the candidate raised; the state is as before.
    """
    _, theirs, _ = _candidate(program, run)
    return compared(made, theirs, limits)


def compared(made: Made, theirs: dict[str, torch.Tensor | None], limits: Limits) -> dict[str, Comparison]:
    """Hold the values of another run against those that eager made, by kind of tensor."""
    return _compare(made.ours, theirs, made.start, limits, made.spread, made.wide)


def apart(program: Program, run: Run, made: Made) -> dict[str, Difference]:
    """Run another rounding of the step that ``made`` was made of, undo it, and tell how far the two are apart.

    Parameters are compared by their updates, since the two may begin with others.

    Raises:
        CandidateFailedError: it raised; the state is as before.
    """
    before, theirs, _ = _candidate(program, run)
    sides = [
        {name: one for name, one in side.items() if _kind(name) in _OF_COMPILED} | _updates(side, start)
        for side, start in (
            (made.ours, made.start),
            (theirs, _parameters(before.live, on_host=before.on_host)),
        )
    ]
    return differences(*sides)[0]


_ROUNDING = 1e-3
"""A gradient that two runs of the same kernels leave so far apart, relative to itself, is mostly rounding."""
_OF_COMPILED = ("result", "gradient", "buffer")


def _kind(name: str) -> str:
    """Give the kind of tensor that a name is of; kinds of optimizer state are told apart by their key."""
    first = name.partition(" ")[0].partition("[")[0].partition(".")[0]
    return f"{first} {name.rpartition(': ')[2]}" if first == "optimizer" else first


def _updates(side: dict[str, torch.Tensor | None], start: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
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

    def join(kind: str, comparisons: Sequence[Comparison]) -> Comparison:
        of_kind = _of_kind(spread, kind)
        now = [measure.with_spread(one, of_kind) for one in comparisons]
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


class Unlike(str):
    """Why two runs of one step are not alike: their numbers are further apart than rounding makes them."""

    __slots__ = ()


def spread_of(program: Program, once: Run, again: Run, most: Limits) -> tuple[Any, dict[str, Difference] | str]:
    """Run one step twice and tell how far the two are apart, or what is wrong with that; the second's outcome stays.

    Args:
        program: what the step changes.
        once: the first run, which is undone.
        again: the second.
        most: the limits of an honest compile. A step that is further from itself draws on something that nobody put
            back (a clock, a generator of its own): no proof could tell whether a recording of it is right.

    Raises:
        CandidateFailedError: the first raised. The step has not been run then: the state is as before.
        Exception: the second raised, which is then the user's own error.
    """
    _, first, _ = _candidate(program, once)
    result, at_step = again()
    try:
        second = values_of(program.holdings, result, at_step)
        found, mismatches = differences(second, first, sized=False)
        same = not mismatches and all(one.equal for one in found.values())
        apart = [] if same else [one for one in _compare(second, first, {}, most, None).values() if not one.agrees]
    except Exception as error:  # noqa: BLE001 - the step is done, whatever is wrong with the comparison
        return result, f"two runs of the same step could not be compared: {describe(error)}"
    if apart:
        return result, Unlike(f"the step does not repeat itself from the same state: {apart[0]}")
    return result, found


def plain_run(holdings: Holdings, run: Callable[[], Any]) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run a step as it is, and note the gradients that its optimizers find."""
    with noting_gradients(holdings) as gradients:
        result = run()
    return result, gradients


@contextlib.contextmanager
def noting_gradients(holdings: Holdings) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the gradients that optimizers find when they step in the block."""
    paths = {id(parameter): name for name, parameter in holdings.parameters().items()}
    gradients: dict[str, torch.Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        gradients.update(gradients_of(optimizer, paths))

    handles = [optimizer.register_step_pre_hook(note) for optimizer in holdings.optimizers.values()]
    try:
        yield gradients
    finally:
        for handle in handles:
            handle.remove()


def values_of(holdings: Holdings, result: Any, at_step: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Name everything that a step has made; the tensors are live."""
    leaves, structure = flatten(result)
    pairs = zip(names(structure, "result"), leaves, strict=True)
    with holdings.still():
        return {
            **{name: one.detach() for name, one in pairs if isinstance(one, torch.Tensor)},
            **{f"gradient of {name} at the optimizer step": one for name, one in at_step.items()},
            **{f"gradient of {name}": one for name, one in holdings.gradients().items()},
            **holdings.tensors(),
        }


def _as_left(values: Mapping[str, torch.Tensor | None], before: Snapshot) -> dict[str, torch.Tensor | None]:
    """Give the values that the candidate left, now that the live tensors hold those from before it."""
    kept = {_key(live): before.saved[name] for name, live in before.live.items()}
    return {name: None if one is None else kept.get(_key(one), one) for name, one in values.items()}


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
