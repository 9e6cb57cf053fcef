"""Proving a tier on real steps: the same step, from the same state, run both ways and compared.

A proof step is a training step like any other. The candidate runs first; then everything that it changed is put back,
its values kept, and the reference runs, whose outcome stays. So nothing is trained twice, and a candidate that is wrong
has changed nothing. It takes one copy of the state: what the candidate made of it and what was there before are
exchanged in place.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.capture import captures_waited_for
from hotloop._torch.foreach import copies
from hotloop.compiling.fallback.causes import describe
from hotloop.measure import Limits, differences, flatten
from hotloop.measure.tree import names
from hotloop.step.audit.rng_listener import draws_noted
from hotloop.step.capture.optimizers import rounded_scalars
from hotloop.step.capture.recording import gradients_of
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.outcomes import Outcome, compare_kinds, judge_kinds
from hotloop.step.prove.own_gradients import beside_own_gradients
from hotloop.step.state.memory import in_place
from hotloop.step.state.random_state import RandomState
from hotloop.step.state.trial_run import Ready, alone, copied, undone_if_it_fails
from hotloop.step.state.undo import StepStart

if TYPE_CHECKING:
    from hotloop.measure import Difference, Failure
    from hotloop.step.state.holdings import Holdings
    from hotloop.step.state.program import Program
    from hotloop.step.state.snapshot import Snapshot

STEPS = 3
"""Consecutive steps on which a candidate must agree."""
Run = Callable[[], tuple[Any, Mapping[str, torch.Tensor]]]
"""Runs a step; gives its result and the gradients that its optimizers found."""


def prove_step(  # noqa: PLR0913 - two runs, what they change, and how far they may be apart
    program: Program,
    candidate: Run,
    reference: Run,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
    compare_random: bool = True,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    updated: Collection[str] = (),
    ready: Ready = alone,
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
        wide: the same step in more bits (`hotloop.step.prove.wide_reference`), which both are held against besides.
        ready: called before each of the two runs, once what is kept beside it was copied.
        updated: parameters that a recording is judged by its own gradients in, whatever noise is in these
            (`hotloop.step.audit.op_trace.Survey.updated`).

    Raises:
        CandidateFailedError: the candidate raised, or the reference found no memory beside what is kept of the
            candidate. The step has not been run then: the state is as before.
        Exception: the reference raised, which is then the user's own error.
    """
    devices = [program.device]
    before, theirs, after = tried(program, candidate, ready)

    def saved() -> tuple[dict[str, torch.Tensor], StepStart]:
        start = _start(before) if limits.compute_dtype is not None else {}
        at_start = StepStart(program.holdings, [program.device])
        at_start.save(gradients=True)
        return start, at_start

    with program.holdings.still():
        try:
            same_gradients = beside_own_gradients(program.holdings, theirs, updated) if updated else {}
        except Exception as error:
            raise CandidateFailedError from error
        start, at_start = copied(saved, ready)
    with draws_noted(program.rng_usage):
        result, at_step = _beside(at_start, reference)
    moved = tuple(program.rng_usage.own(RandomState(devices).moved_since(after))) if compare_random else ()
    comparisons, failed = {}, ""
    try:
        with program.holdings.still():
            _find_unseen_writes(program, at_start.untouched() - _stepped(program, at_step), start)
            ours = values_of(program.holdings, result, at_step)
        scalars = rounded_scalars(program.holdings.optimizers.values())
        comparisons = compare_kinds(ours, theirs, start, limits, spread, wide, scalars, same_gradients=same_gradients)
    except Exception as error:  # noqa: BLE001 - the step is done and right; that the tier is not known to be, is told
        failed = describe(error)
    return Outcome(result, comparisons, before.nbytes, before.on_host, moved, failed)


def _find_unseen_writes(program: Program, untouched: set[int], start: Mapping[str, torch.Tensor]) -> None:
    """Have parameters copied at each step that the step writes past torch's counters: ``parameter.data.mul_(0.9)``.

    Averages of weights are written so. Where code fails after that, the step can be undone by a copy alone.

    Args:
        program: what the step changes.
        untouched: ids of the parameters that no write of the step has counted for.
        start: the parameters before the step, by the names of `values_of`.
    """
    found = program.holdings.found
    known = {one.data_ptr() for one in found}
    for name, one in program.holdings.parameters().items():
        was = start.get(f"parameter {name}")
        if was is None or id(one) not in untouched or one.data_ptr() in known:
            continue
        if not torch.equal(one, was.to(one.device)):
            found.append(in_place(one))


def _stepped(program: Program, at_step: Mapping[str, torch.Tensor]) -> set[int]:
    """Give the ids of the parameters that optimizers stepped: fused kernels write without counting."""
    return {id(one) for name, one in program.holdings.parameters().items() if name in at_step}


def _start(before: Snapshot) -> dict[str, torch.Tensor]:
    """Copy the parameters as they are before the step; to the host where the device has no memory left for it."""
    try:
        return parameters_of(before.live, on_host=before.on_host)
    except torch.OutOfMemoryError:
        pass  # the copies that were made are gone before the next are
    return parameters_of(before.live, on_host=True)


def _beside(at_start: StepStart, reference: Run) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run a reference beside the copies of a proof; where these are too much for the memory, the step has not begun."""
    try:
        return reference()
    except torch.OutOfMemoryError as error:
        if at_start.wrote():
            raise
        at_start.restore()
        raise CandidateFailedError from error


def tried(
    program: Program, run: Run, ready: Ready = alone
) -> tuple[Snapshot, dict[str, torch.Tensor | None], RandomState]:
    """Run a candidate and undo it; gives the values that it left, and where its random streams were."""

    def values() -> tuple[dict[str, torch.Tensor | None], RandomState]:
        found = values_of(program.holdings, *run())
        return found, RandomState([program.device])

    (found, after), before = undone_if_it_fails(program, values, ready)
    try:
        before.exchange()
    except Exception as error:
        raise CandidateFailedError(undone=False) from error  # half of the state is the candidate's
    return before, _as_left(found, before), after


def parameters_of(live: Mapping[str, torch.Tensor], *, on_host: bool) -> dict[str, torch.Tensor]:
    """Copy the parameters among live tensors, there or to the host."""
    found = {name: one for name, one in live.items() if name.startswith("parameter ")}
    if on_host:
        return {name: one.to("cpu", copy=True) for name, one in found.items()}
    return dict(zip(found, copies(list(found.values())), strict=True))


@dataclasses.dataclass(frozen=True)
class Unlike:
    """Two runs of one step are not alike: their numbers are further apart than rounding makes them.

    Args:
        why: in one line.
        spread: how far apart they are, by tensor.
        failures: what is past its limit.
    """

    why: str
    spread: dict[str, Difference]
    failures: tuple[Failure, ...]


def spread_of(
    program: Program,
    once: Run,
    again: Run,
    most: Limits,
) -> tuple[Any, dict[str, Difference] | Unlike | str]:
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
    _, first, _ = tried(program, once)
    result, at_step = again()
    try:
        second = values_of(program.holdings, result, at_step)
        found, mismatches = differences(second, first, sized=False)
        same = not mismatches and all(one.equal for one in found.values())
        apart = [] if same else [one for one in judge_kinds(found, mismatches, most).values() if not one.agrees]
    except Exception as error:  # noqa: BLE001 - the step is done, whatever is wrong with the comparison
        return result, f"two runs of the same step could not be compared: {describe(error)}"
    if apart:
        failures = tuple(each for one in apart for each in one.failures)
        return result, Unlike(f"the step does not repeat itself from the same state: {apart[0]}", found, failures)
    return result, found


def plain_run(
    holdings: Holdings, run: Callable[[], Any], *, as_left: bool = False
) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run a step as it is, and note the gradients that its optimizers find.

    Code that captures for itself, as under ``reduce-overhead``, draws eager's random numbers in its first replay, too.

    Args:
        holdings: what the step changes.
        run: the step.
        as_left: give these gradients as the step leaves them, which a recording does; parameters and optimizer state
            tell what they were. Else they are copied where the step was seen to write into them, as
            ``zero_grad(set_to_none=False)`` does: only zeros could be compared after it.
    """
    copied = holdings.gradients_altered and not as_left
    with captures_waited_for(), noting_gradients(holdings, copied=copied) as gradients:
        result = run()
    return result, gradients


@contextlib.contextmanager
def noting_gradients(holdings: Holdings, *, copied: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the gradients that optimizers find when they step in the block, or copies of them."""
    paths = {id(parameter): name for name, parameter in holdings.parameters().items()}
    gradients: dict[str, torch.Tensor] = {}

    def note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        found = gradients_of(optimizer, paths)
        if copied:
            dense = [name for name, one in found.items() if one.layout == torch.strided]
            found.update(zip(dense, copies([found[name] for name in dense]), strict=True))
        gradients.update(found)

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
            **{f"gradient of {name} at the optimizer step": in_place(one) for name, one in at_step.items()},
            **{
                f"gradient of {name}": None if one is None else in_place(one)
                for name, one in holdings.gradients().items()
            },
            **holdings.tensors(),
        }


def _as_left(values: Mapping[str, torch.Tensor | None], before: Snapshot) -> dict[str, torch.Tensor | None]:
    """Give the values that the candidate left, now that the live tensors hold those from before it."""
    kept = {_key(live): before.saved[name] for name, live in before.live.items()}
    return {name: None if one is None else kept.get(_key(one), one) for name, one in values.items()}


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
