"""Runs an eager and a compiled program of the same making in lockstep, and finds where the compiled one is wrong."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.random_state import RandomState
from hotloop.errors import StaleOutputError
from hotloop.measure import compare, flatten, over_steps
from hotloop.measure.tree import names
from hotloop.prove.harness.result import REMEDY, Finding
from hotloop.prove.harness.subject import Calls, noting_calls
from hotloop.step.capture.engines import traced_path
from hotloop.step.prove.proof import plain_run, values_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Comparison, Limits
    from hotloop.prove.harness.subject import Subject

_REPORT_IT = "train without this preset, and report it: this is a bug of the compiler's or of ours"
_NUMBERS = "see what hotloop verify says of this preset, beside float64; train without it if that fails"
_NO_ROOM = (
    "the harness holds the program twice, eager and compiled: run it where nothing else uses the GPU, or on a smaller "
    "batch; a program that did not fit into memory is not proven safe"
)


@dataclasses.dataclass
class _Kept:
    """An output that is held: its name, its live tensors, and copies of them as they were at first."""

    what: str
    copies: dict[str, torch.Tensor]
    live: dict[str, torch.Tensor]

    def unchanged(self) -> bool:
        """Return whether the live tensors equal their copies; NaN equals NaN."""
        with torch.no_grad():
            for name, live in self.live.items():
                copy = self.copies[name]
                both_nan = (live != live) & (copy != copy)  # noqa: PLR0124
                if not bool(((live == copy) | both_nan).all()):
                    return False
        return True


class _WrongError(Exception):
    """The compiled program cannot go on, for the reason in ``finding``."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class Lockstep:
    """Runs both programs and compares them.

    Args:
        eager: the reference.
        compiled: the same program, compiled, after the same steps.
        limits: how far the two may be apart.
    """

    def __init__(self, eager: Subject, compiled: Subject, limits: Limits) -> None:
        self._eager, self._compiled, self._limits = eager, compiled, limits
        self._noted: Calls = {}
        self._comparisons: dict[str, list[Comparison]] = collections.defaultdict(list)
        self._held: list[_Kept] = []
        self.findings: list[Finding] = []
        self.nearest = ""
        self.ended = False
        """The compiled program could not go on."""

    def run(self, rounds: int, calls: int) -> None:
        """Run rounds of a training step and calls without gradients, until something is wrong."""
        batches = self._eager.workload.endless()
        try:
            for number in range(rounds):
                batch = next(batches)
                before, self._held = self._held, []
                self._step(batch, number)
                for call in range(calls):
                    self._infer(batch, number, call, calls)
                self._check_held(before)
            self._check_held(self._held)
        except _WrongError as wrong:
            self.ended = True
            self.findings.append(wrong.finding)
        self._judge()

    def _step(self, batch: Any, number: int) -> None:
        """Run a training step of both, from the same state with the same random numbers."""
        what = f"training step {number + 1}"
        self._compiled.follow(self._eager)
        random = RandomState([self._eager.device])
        with noting_calls(self._eager.models, self._noted), traced_path(self._eager.device):
            made = self._eager.made(batch)
        random.restore()

        def compiled_step() -> tuple[Any, dict[str, torch.Tensor | None]]:
            result, at_step = plain_run(self._compiled.holdings, lambda: self._compiled.step(batch))
            return result, values_of(self._compiled.holdings, result, at_step)

        result, theirs = self._compiled_call(what, compiled_step)
        for kind, comparison in self._compiled_call(what, lambda: made.compare(theirs, self._limits)).items():
            self._comparisons[kind].append(comparison)
        self._keep(f"the result of {what}", result)
        self._compiled.follow(self._eager)

    def _infer(self, batch: Any, number: int, call: int, calls: int) -> None:
        """Call both without gradients."""
        what = f"call {call + 1} of {calls} after training step {number + 1}"
        random = RandomState([self._eager.device])
        eager = [_copied(output) for output in self._eager.infer(batch, self._noted, call)]
        random.restore()
        outputs = self._compiled.infer(batch, self._noted, call)
        for ours in eager:
            output = self._compiled_call(what, lambda: next(outputs))
            theirs = self._compiled_call(what, functools.partial(_copied, output))
            self._comparisons["without gradients"].append(compare(ours, theirs, self._limits))
            self._keep(f"the output of {what}", output)
            del output

    def _compiled_call(self, what: str, run: Callable[[], Any]) -> Any:
        """Run a part of the compiled program. Eager has run the same part, so an exception is not the user's own."""
        try:
            return run()
        except StaleOutputError as error:
            raise _WrongError(Finding(kind="held", what=f"{what}: {error}")) from error
        except Exception as error:
            raised = f"{what} raised where eager does not: {type(error).__name__}: {error}"
            remedy = _NO_ROOM if isinstance(error, torch.OutOfMemoryError) else _REPORT_IT
            raise _WrongError(Finding(kind="error", what=raised, remedy=remedy)) from error

    def _keep(self, what: str, output: Any) -> None:
        """Hold an output as a program may, to check it later."""
        copies = self._compiled_call(what, lambda: _copied(output))
        self._held.append(_Kept(what, copies, _split(output)))

    def _check_held(self, held: list[_Kept]) -> None:
        """Check that held outputs are unchanged after everything that ran since."""
        for kept in held:
            if not self._compiled_call(f"{kept.what}, held,", kept.unchanged):
                what = f"{kept.what} changed while it was held: a later call has overwritten it"
                raise _WrongError(Finding(kind="held", what=what, remedy=REMEDY))

    def _judge(self) -> None:
        nearest = 0.0
        for kind, comparisons in self._comparisons.items():
            try:
                joined = over_steps(comparisons)
            except StaleOutputError as error:
                self.findings.append(Finding(kind="held", what=str(error)))
                continue
            if not joined.agrees:
                self.findings.append(Finding(kind="numerics", what=f"{kind}: {joined}", remedy=_NUMBERS))
            elif joined.worst is not None and joined.nearness > nearest:
                nearest = joined.nearness
                self.nearest = f"{kind} nearest its limit: {joined.worst.name}, at {joined.nearness:.0%} of it"


def _split(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of an output by name."""
    leaves, structure = flatten(output)
    named = zip(names(structure, "output"), leaves, strict=True)
    return {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}


def _copied(output: Any) -> dict[str, torch.Tensor]:
    """Return copies of the tensors of an output by name."""
    return {name: tensor.detach().clone() for name, tensor in _split(output).items()}
