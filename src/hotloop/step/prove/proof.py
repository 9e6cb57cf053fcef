"""Proves a tier on real steps: the same step, from the same state, is run both ways and compared.

A proof step is a training step like any other. The candidate runs first. Then everything that it changed is put back,
its values are kept, and the reference runs, whose outcome stays. So nothing is trained twice, and a wrong candidate has
changed nothing. A proof takes one copy of the state: the values that the candidate left and those from before it are
exchanged in place.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.capture import captures_waited_for
from hotloop._torch.foreach import copies
from hotloop._torch.hooks import before_steps
from hotloop._torch.places import address_of
from hotloop._torch.random_state import RandomState
from hotloop._torch.scaler import scaled_steps
from hotloop.errors import describe
from hotloop.interrupts import interruptible
from hotloop.measure import Limits, differences, flatten
from hotloop.measure.tree import names
from hotloop.step.capture.optimizers import Recorded, repeatable, step_again
from hotloop.step.capture.recording import gradients_of
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove.outcomes import Outcome, compare_kinds, judge_kinds
from hotloop.step.state.holdings import Holdings, in_place
from hotloop.step.state.memory_limit import on_host
from hotloop.step.state.snapshot import Snapshot, chunks
from hotloop.step.state.trial_run import Ready, alone, copied, undone_if_it_fails

if TYPE_CHECKING:
    from hotloop.measure import Difference
    from hotloop.step.state.program import Program

Run = Callable[[], tuple[Any, Mapping[str, torch.Tensor]]]
"""Runs a step; returns its result and the gradients that its optimizers read."""
Values = Mapping[str, "torch.Tensor | None"]
"""What a step has made, by the names of `values_of`."""


def prove_step(  # noqa: PLR0913 - two runs, what they change, and how far they may be apart
    program: Program,
    candidate: Run,
    reference: Run,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
    wide: Mapping[str, torch.Tensor | None] | None = None,
    own_steps: Callable[[Values], dict[str, Difference]] = lambda _: {},
    ready: Ready = alone,
) -> Outcome:
    """Run one step both ways and compare: results, gradients, parameters, optimizer state, buffers, other state.

    With the limits of compiled code, parameters are compared by their updates. The optimizer's state is not compared
    then: it follows from the gradients through code that is not compiled.

    Args:
        program: the program that the step changes.
        candidate: runs the tier to prove.
        reference: runs the step as it is compared with; its outcome stays.
        limits: how far the two may be apart.
        spread: the difference of the reference from itself, by tensor, if its kernels are not deterministic.
        wide: the values of the step in more bits (`hotloop.step.prove.wide_reference`), which both are compared with.
        own_steps: compares the optimizer steps of a recording by its own gradients (`beside_own_gradients`).
        ready: decides whether the runs go on: once the copies beside each were made, and after the candidate's.

    Raises:
        CandidateFailedError: the candidate raised, or the reference found no memory beside the candidate's copies. The
            step has not been run then: the state is as before.
        Exception: the reference raised, which is then the user's own error.
    """
    before, theirs, after = run_and_undo(program, candidate, ready)

    def saved() -> tuple[dict[str, Difference], dict[str, torch.Tensor], Snapshot]:
        start = _start(program, before) if limits.compute_dtype is not None else {}
        return own_steps(theirs), start, Snapshot(program, everything=False)

    with program.holdings.still():
        same_gradients, start, at_start = copied(saved, ready)
    result, at_step = _unless_memory_ends(reference, at_start)
    moved = tuple(program.rng_usage.own(RandomState([program.device]).moved_since(after)))
    comparisons, failed = {}, ""
    try:
        with program.holdings.still():
            _find_unseen_writes(program, at_start.untouched(), at_step, start)
            ours = values_of(program.holdings, result, at_step)
        comparisons = compare_kinds(ours, theirs, start, limits, spread, wide, same_gradients)
    except Exception as error:  # noqa: BLE001 - the step is done and right; only the tier is not known to be right
        failed = describe(error)
    return Outcome(result, comparisons, before.nbytes, before.on_host, moved, failed)


def _unless_memory_ends(run: Run, at_start: Snapshot) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run the step that stays, beside the copies of a proof.

    Raises:
        CandidateFailedError: there was no memory for it beside them; it was undone.
    """
    try:
        return run()
    except torch.OutOfMemoryError as error:
        if at_start.wrote():
            raise
        at_start.restore()
        raise CandidateFailedError from error


def _start(program: Program, before: Snapshot) -> dict[str, torch.Tensor]:
    """Copy the parameters as they are before the step; to the host if the device has no memory left for the copies."""
    room = program.room.for_copies(program.device)
    size = sum(one.nbytes for name, one in before.live.items() if name.startswith("parameter "))
    try:
        return parameters_of(before.live, on_host=before.on_host or (room is not None and size > room))
    except torch.OutOfMemoryError:
        pass  # the copies made so far are freed before the next are made
    return parameters_of(before.live, on_host=True)


def beside_own_gradients(
    program: Program, recorded: Iterable[torch.optim.Optimizer], parameters: Collection[str], theirs: Values
) -> dict[str, Difference]:
    """Compare a recording's parameters and optimizer state with its optimizer's step on its own gradients.

    Adam divides a gradient by its own size. A gradient that is only rounding (of the bias of keys that are only
    compared) becomes a full step in any direction, so no repeat of the step shows how far two right runs are apart
    there. Given the same gradients, which are judged themselves, an optimizer repeats itself.

    Args:
        program: what the step changes, as it is before the step.
        recorded: the optimizers whose steps were recorded.
        parameters: the names of those that nothing but one step of an optimizer has written (`AuditFindings.updated`).
        theirs: the values that the recording left, named by `values_of`.

    Returns:
        the differences by name. Nothing for gradients that are not finite: a GradScaler leaves such a step out.
    """
    named = {id(parameter): name for name, parameter in program.holdings.parameters().items()}
    found: dict[str, Difference] = {}
    for optimizer in filter(repeatable, recorded):
        stepped: dict[str, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            gradient = theirs.get(f"gradient of {named[id(parameter)]} at the optimizer step")
            if gradient is not None:
                stepped[named[id(parameter)]] = parameter, gradient
        if torch.nn.utils.get_total_norm([gradient for _, gradient in stepped.values()]).isfinite():
            chosen = {name: pair for name, pair in stepped.items() if name in parameters}
            found |= _step_of(Recorded(optimizer, program.device), chosen, theirs)
    return found


def _step_of(
    recorded: Recorded, stepped: Mapping[str, tuple[torch.nn.Parameter, torch.Tensor]], theirs: Values
) -> dict[str, Difference]:
    """Take an optimizer's step on copies, by the kernel of a recording, and compare."""
    found: dict[str, Difference] = {}
    parameters = {name: parameter for name, (parameter, _) in stepped.items()}
    # In eight parts: the copy of a part is small beside the copy of everything that a proof makes.
    for part in chunks(parameters, sum(parameter.nbytes for parameter in parameters.values()) // 8):
        made: dict[str, torch.Tensor] = {}
        with recorded.on_device(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of a capturable step outside of a capture
            again = step_again(recorded.optimizer, *zip(*(stepped[name] for name in part), strict=True))
        for name, (value, state) in zip(part, again, strict=True):  # with the names of `values_of`
            made[f"parameter {name}"] = value
            tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
            made |= {f"optimizer state of {name}: {key}": one for key, one in tensors.items()}
        found |= differences(made, {name: theirs.get(name) for name in made}, sized=False)[0]
    return found


def _find_unseen_writes(
    program: Program, untouched: set[int], at_step: Collection[str], start: Mapping[str, torch.Tensor]
) -> None:
    """Find parameters that the step writes without torch counting it, and have them copied at each step from now on.

    ``parameter.data.mul_(0.9)`` is such a write, and averages of weights are written so. If code fails after such a
    write, only a copy can undo the step.

    Args:
        program: the program that the step changes.
        untouched: ids of the parameters that torch counted no write for.
        at_step: names of the parameters that optimizers stepped: fused kernels write without counting.
        start: the parameters before the step, by the names of `values_of`.
    """
    found = program.holdings.found
    known = {tensor.data_ptr() for tensor in found}
    for name, parameter in program.holdings.parameters().items():
        was, held = start.get(f"parameter {name}"), in_place(parameter)
        counted = id(parameter) not in untouched or name in at_step
        if was is None or counted or held.data_ptr() in known:
            continue
        if not torch.equal(held, was.to(held.device)):
            found.append(held)


def run_and_undo(
    program: Program, run: Run, ready: Ready = alone
) -> tuple[Snapshot, dict[str, torch.Tensor | None], RandomState]:
    """Run a candidate and undo it; return the snapshot, the values the candidate left, and its random positions."""

    def values() -> tuple[dict[str, torch.Tensor | None], RandomState]:
        found = values_of(program.holdings, *run())
        return found, RandomState([program.device])

    (found, after), before = undone_if_it_fails(program, values, ready)
    found = copied(functools.partial(_apart, found, before), ready)
    try:
        before.exchange()
    except Exception as error:
        raise CandidateFailedError(undone=False) from error  # half of the state is the candidate's
    # The live tensors hold the values from before the candidate now, and the snapshot those that it left.
    lacking = copied(functools.partial(_room_for_a_step, program, before), ready)
    left = {_key(live): before.saved[name] for name, live in before.live.items()}
    kept = {name: None if one is None else left.get(_key(one), one) for name, one in found.items()}
    return before, on_host(kept, program.device) if lacking > 0 else kept, after


def _apart(found: Mapping[str, torch.Tensor | None], before: Snapshot) -> dict[str, torch.Tensor | None]:
    """Copy what lies in a part of memory that a snapshot holds whole: gradients within a bucket of DDP's."""
    live = [one for one in before.live.values() if one.layout == torch.strided]
    whole, memory = {_key(one) for one in live}, {address_of(one) for one in live}
    return {
        name: one.clone() if one is not None and _key(one) not in whole and address_of(one) in memory else one
        for name, one in found.items()
    }


def _room_for_a_step(program: Program, before: Snapshot) -> int:
    """Make room for the eager step that follows a candidate; return the bytes that it may lack then."""
    program.room.check_recording(program.device)
    return before.make_room()


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def parameters_of(live: Mapping[str, torch.Tensor], *, on_host: bool) -> dict[str, torch.Tensor]:
    """Copy the parameters among live tensors, on their device or to the host."""
    found = {name: tensor for name, tensor in live.items() if name.startswith("parameter ")}
    if on_host:
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}
    return dict(zip(found, copies(list(found.values())), strict=True))


def spread_of(
    program: Program, once: Run, again: Run, most: Limits, ready: Ready = alone
) -> tuple[Any, dict[str, Difference] | str]:
    """Run one step twice; return the second result, and how far the two runs are apart, or why they are not alike.

    Args:
        program: the program that the step changes.
        once: the first run, which is undone.
        again: the second run, whose outcome stays.
        most: the limits of an honest compile. A step that is further from itself draws on something that nobody put
            back (a clock, a generator of its own): no proof could tell whether a recording of it is right.
        ready: decides whether the runs go on.

    Raises:
        CandidateFailedError: the first run raised, or there was no memory for the second beside what the first has
            left. The step has not been run then: the state is as before.
        Exception: the second run raised, which is then the user's own error.
    """
    _, first, _ = run_and_undo(program, once, ready)
    at_start = copied(functools.partial(Snapshot, program, everything=False), ready)
    result, at_step = _unless_memory_ends(again, at_start)
    try:
        second = values_of(program.holdings, result, at_step)
        found, mismatches = differences(second, first, sized=False)
        same = not mismatches and all(one.equal for one in found.values())
        apart = [] if same else [one for one in judge_kinds(found, mismatches, most).values() if not one.agrees]
    except Exception as error:  # noqa: BLE001 - the step is done, whatever is wrong with the comparison
        return result, f"two runs of the same step could not be compared: {describe(error)}"
    return result, f"the step does not repeat itself from the same state: {apart[0]}" if apart else found


def plain_run(
    holdings: Holdings, run: Callable[[], Any], *, as_left: bool = False
) -> tuple[Any, Mapping[str, torch.Tensor]]:
    """Run a step as it is; return its result, and the gradients that its optimizers read, by parameter.

    Code that captures for itself, as under ``reduce-overhead``, draws eager's random numbers in its first replay, too.

    Args:
        holdings: everything that the step changes.
        run: the step.
        as_left: return the gradients as the step leaves them, as a recording does; parameters and optimizer state show
            their earlier values. Otherwise they are copied if the step was seen to write into them afterwards, as
            ``zero_grad(set_to_none=False)`` does: only zeros could be compared then.
    """
    gradients: dict[str, torch.Tensor] = {}
    with captures_waited_for():
        read = _gradients_read.setdefault(holdings, _GradientsRead())
        with read.noted_in(gradients, holdings, as_left=as_left):
            result = interruptible(run)
    holdings.keep_outside(result)
    return result, gradients if read.failed is None else _Unread(read.failed)


class _Unread(Mapping[str, Any]):
    """Gradients that could not be noted: the step is done and right, and whoever compares it hears why not."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, name: str) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        raise self._error


class _GradientsRead:
    """The hook that notes the gradients which optimizers read: one, since code may be guarded on it and its number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._paths: dict[int, str] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        self._copied = False
        self.failed: Exception | None = None
        """What noting them has raised: it is none of the user's."""

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            try:
                noted(optimizer)
            except Exception as error:  # noqa: BLE001 - the step goes on, and is compared with nothing
                self.failed = error

        def noted(optimizer: torch.optim.Optimizer) -> None:
            found = gradients_of(optimizer, self._paths)
            if self._copied:
                dense = [name for name, gradient in found.items() if gradient.layout == torch.strided]
                found.update(zip(dense, copies([found[name] for name in dense]), strict=True))
            self._gradients.update(found)

        def scaled(optimizer: torch.optim.Optimizer, step: Callable[[], Any], found: torch.Tensor) -> Any:
            skips = found.item() > 0
            if skips:  # no hook runs; a recording, which steps in any case, has noted them
                note(optimizer, (), {})
            return None if skips else step()

        self._note, self._scaled = note, scaled

    @contextlib.contextmanager
    def noted_in(self, gradients: dict[str, torch.Tensor], holdings: Holdings, *, as_left: bool) -> Iterator[None]:
        """Note gradients in a dict while the block runs."""
        self._paths = {id(parameter): name for name, parameter in holdings.parameters().items()}
        self.failed = None
        self._gradients, self._copied = gradients, holdings.gradients_altered and not as_left
        handles = []
        try:
            for name, optimizer in holdings.optimizers.items():
                handles.append(before_steps(optimizer, self._note, self._numbers.get(name)))
                self._numbers[name] = handles[-1].id
            with scaled_steps(self._scaled):
                yield
        finally:
            self._gradients = {}
            for handle in handles:
                handle.remove()


_gradients_read: weakref.WeakKeyDictionary[Holdings, _GradientsRead] = weakref.WeakKeyDictionary()


def values_of(holdings: Holdings, result: Any, at_step: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Return everything that a step has made, by name; the tensors are live."""
    leaves, structure = flatten(result)
    pairs = zip(names(structure, "result"), leaves, strict=True)
    with holdings.still():
        return {
            **{name: leaf.detach() for name, leaf in pairs if isinstance(leaf, torch.Tensor)},
            **{f"gradient of {name} at the optimizer step": in_place(one) for name, one in at_step.items()},
            **{
                f"gradient of {name}": None if one is None else in_place(one)
                for name, one in holdings.gradients().items()
            },
            **holdings.tensors(),
        }
