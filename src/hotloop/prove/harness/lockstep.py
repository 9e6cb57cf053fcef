"""Two programs of the same making in lockstep, one eager and one compiled, and what of the compiled one is wrong."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import StaleOutputError
from hotloop.measure import compare_with_reference, flatten, over_steps
from hotloop.measure.tree import names
from hotloop.prove.harness.program import Calls, noting_calls
from hotloop.prove.harness.result import REMEDY, Finding
from hotloop.step.capture.engines import traced_path
from hotloop.step.prove.proof import plain_run, values_of
from hotloop.step.prove.step_outputs import compared
from hotloop.step.state.random_state import RandomState
from hotloop.step.workload import arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.measure import Comparison, Limits
    from hotloop.prove.harness.program import Subject

_REPORT_IT = "train without this preset, and report it: this is a bug of the compiler's or of ours"
_NO_ROOM = (
    "the harness holds the program twice, eager and compiled: run it where nothing else uses the GPU, or on a smaller "
    "batch; what a memory that is too small leaves unproven is not safe"
)


@dataclasses.dataclass
class _Kept:
    """An output that is held: what it is, as it was when it came, and itself."""

    what: str
    copies: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor]


class _WrongError(Exception):
    """The compiled program cannot go on; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Lockstep:
    """Runs the two and compares.

    Args:
        eager: the reference.
        compiled: the same program, compiled, after the same steps.
        limits: how far the two may be apart.
        hold: hold what the compiled program gives, and look at it again after later calls.
        referred: hold both against the same in more bits besides, by which a limit grows with eager's own rounding.
    """

    def __init__(
        self, eager: Subject, compiled: Subject, limits: Limits, *, hold: bool, referred: bool = False
    ) -> None:
        self._eager, self._compiled, self._limits, self._hold = eager, compiled, limits, hold
        self._wide_of = limits.compute_dtype if referred else None
        self._noted: Calls = {}
        self._comparisons: dict[str, list[Comparison]] = collections.defaultdict(list)
        self._held: list[_Kept] = []
        self.findings: list[Finding] = []
        self.nearest = ""
        self.ended = False
        """Something was so wrong that the compiled program could not go on."""
        self.may_be_rounding = False
        """Something is wrong, and all of that are numbers past their limits."""

    def run(self, rounds: int, calls: int) -> None:
        """Run rounds of a training step and calls without gradients; what is wrong ends it."""
        batches = self._eager.workload.endless()
        try:
            for number in range(rounds):
                batch = next(batches)
                before, self._held = self._held, []
                self._step(batch, number)
                for call in range(calls):
                    self._infer(batch, number, call, calls)
                self._outlived(before)
            self._outlived(self._held)
        except _WrongError as wrong:
            self.ended = True
            self.findings.append(wrong.finding)
        self._judge()

    def _step(self, batch: Any, number: int) -> None:
        """One training step of both, from the same state with the same random numbers."""
        what = f"training step {number + 1}"
        wide = self._in_more_bits(self._eager.workload.step, *arguments(batch))
        self._compiled.follow(self._eager)
        random = RandomState([self._eager.device])
        with noting_calls(self._eager.models, self._noted), traced_path(self._eager.device):
            made = self._eager.made(batch, wide)
        random.restore()
        result, theirs = self._compiled_call(what, lambda: self._values(batch))
        for kind, comparison in self._compiled_call(what, lambda: compared(made, theirs, self._limits)).items():
            self._comparisons[kind].append(comparison)
        self._keep(f"the result of {what}", result)
        self._compiled.follow(self._eager)

    def _values(self, batch: Any) -> tuple[Any, dict[str, torch.Tensor | None]]:
        result, at_step = plain_run(self._compiled.holdings, lambda: self._compiled.step(batch))
        return result, values_of(self._compiled.holdings, result, at_step)

    def _infer(self, batch: Any, number: int, call: int, calls: int) -> None:
        """One call of both without gradients."""
        what = f"call {call + 1} of {calls} after training step {number + 1}"
        wide = self._in_more_bits(lambda: list(self._eager.infer(batch, self._noted, call))) or {}
        random = RandomState([self._eager.device])
        eager = [_taken(one) for one in self._eager.infer(batch, self._noted, call)]
        random.restore()
        given = self._compiled.infer(batch, self._noted, call)
        for index, (ours, others) in enumerate(eager):
            output = self._compiled_call(what, lambda: next(given))
            theirs, rest = self._compiled_call(what, functools.partial(_taken, output))
            reference = {name: wide.get(name.replace("output", f"result[{index}]", 1)) for name in ours}
            comparison = compare_with_reference(reference, ours, theirs, self._limits)
            self._comparisons["without gradients"].append(comparison)
            if comparison.agrees and not _same(others, rest):
                said = f"{what} gave {rest}, eager {others}, from values that agree"
                self.findings.append(Finding(kind="numerics", what=said, fails=False))
            self._keep(f"the output of {what}", output)
            del output

    def _in_more_bits(self, step: Callable[..., Any], *call: Any) -> Mapping[str, torch.Tensor | None] | None:
        """Run something of eager's in more bits, and undo it; None where that is not wanted, or cannot be."""
        if self._wide_of is None:
            return None
        with traced_path(self._eager.device):
            return self._eager.in_more_bits(step, self._wide_of, *call)

    def _compiled_call(self, what: str, run: Callable[[], Any]) -> Any:
        """Run something of the compiled program; eager has done the same, so what it raises is not the user's own."""
        try:
            return run()
        except StaleOutputError as error:
            raise _WrongError(Finding(kind="held", what=f"{what}: {error}")) from error
        except Exception as error:
            said = f"{what} raised where eager does not: {type(error).__name__}: {error}"
            remedy = _NO_ROOM if isinstance(error, torch.OutOfMemoryError) else _REPORT_IT
            raise _WrongError(Finding(kind="error", what=said, remedy=remedy)) from error

    def _keep(self, what: str, output: Any) -> None:
        """Hold an output as a program may, to be looked at later."""
        if self._hold:
            copies, _ = self._compiled_call(what, lambda: _taken(output))
            self._held.append(_Kept(what, copies, _tensors(output)[0]))

    def _outlived(self, held: list[_Kept]) -> None:
        """What was held must be as it was, after whatever ran since."""
        for kept in held:
            same = self._compiled_call(f"{kept.what}, held,", functools.partial(_unchanged, kept))
            if same:
                continue
            what = f"{kept.what} changed while it was held: a later call has overwritten it"
            raise _WrongError(Finding(kind="held", what=what, remedy=REMEDY))

    def _judge(self) -> None:
        nearest, numbers = 0.0, not any(one.fails for one in self.findings)
        for kind, comparisons in self._comparisons.items():
            try:
                found = over_steps(comparisons)
            except StaleOutputError as error:
                self.findings.append(Finding(kind="held", what=str(error)))
                numbers = False
                continue
            if not found.agrees:
                numbers &= found.may_be_rounding
                self.findings.append(Finding(kind="numerics", what=f"{kind}: {found}", remedy=_REPORT_IT))
            elif found.worst is not None and found.nearness > nearest:
                nearest = found.nearness
                self.nearest = f"{kind} nearest its limit: {found.worst.name}, at {found.nearness:.0%} of it"
        self.may_be_rounding = numbers and any(one.fails for one in self.findings)


def _tensors(output: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Give the tensors of an output by name, and what is none."""
    leaves, structure = flatten(output)
    named = dict(zip(names(structure, "output"), map(_seen, leaves), strict=True))
    tensors = {name: one for name, one in named.items() if isinstance(one, torch.Tensor)}
    return tensors, {name: one for name, one in named.items() if name not in tensors}


def _seen(leaf: Any) -> Any:
    """Give a numpy array of numbers as the tensor that shares its memory: a sampler's result is one; all else as is."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(leaf, numpy.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    shares = leaf.flags.writeable and all(stride >= 0 for stride in leaf.strides)  # torch knows no others
    try:
        return torch.from_numpy(leaf if shares else leaf.copy())
    except TypeError:  # numbers of a kind that torch does not have
        return leaf


def _same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Tell whether what is no tensor is the same, as far as it can be compared."""
    return ours.keys() == theirs.keys() and all(_equal(one, theirs[name]) for name, one in ours.items())


def _equal(one: Any, other: Any) -> bool:
    by_identity = getattr(type(one), "__eq__", None) is object.__eq__
    if type(one) is type(other) and by_identity:  # two results of the program's own class: nothing tells
        return True
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - NaN
    except Exception:  # noqa: BLE001 - a class of the program's own compares as it likes, or not at all
        return True


def _taken(output: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Give the tensors of an output as copies, and what is none."""
    live, others = _tensors(output)
    return {name: one.detach().clone() for name, one in live.items()}, others


def _unchanged(kept: _Kept) -> bool:
    with torch.no_grad():
        return all(
            bool(((one == kept.copies[name]) | ((one != one) & (kept.copies[name] != kept.copies[name]))).all())  # noqa: PLR0124 - NaN
            for name, one in kept.live.items()
        )
