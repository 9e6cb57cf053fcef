"""One suite for every integration: what hotloop promises, held against the framework's own eager run.

An integration's tests subclass `Conformance`, say how their framework fits a `Task`, and inherit the tests; pytest
finds them under the subclass's name. Nothing here needs a framework, a GPU, or pytest itself::

    class TestMyTrainer(Conformance):
        def fit(self, task): ...
        def saved(self, path): ...

What a framework's hooks make impossible is declared in ``limits``, with the reason; the test then holds what is
promised in its place, and `promises` puts both into the table that the docs show.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from torch import nn

from hotloop import events as ev
from hotloop.compiling.observe import watch
from hotloop.errors import CompiledRunError
from hotloop.testing.assertions import assert_max_recompiles
from hotloop.testing.captured import captured_step_emulation
from hotloop.testing.fitting import (
    Fitted,
    SmallClassifier,
    Task,
    flat,
    inventory,
    placed,
    plain_python,
    said,
    small_batches,
)
from hotloop.testing.planted import TELLS, Stage, forget_compiled_code, planted_failure
from hotloop.testing.promises import Promises, check

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import SimpleNamespace


_eager_fits: collections.defaultdict[type, dict[Any, Fitted]] = collections.defaultdict(dict)
"""What the eager fits of a suite gave, by their settings."""


class Conformance(Promises):
    """The promises that every integration keeps, as tests; see the module's description for how to subclass it."""

    device: ClassVar[str] = "cpu"
    """Where models and batches are: on ``"cuda"`` steps are captured in CUDA graphs, elsewhere by the stand-in."""
    run: ClassVar[str] = "aot_eager"
    """What hotloop is asked for where nothing is captured; compiled by `aot_eager`, into which failures are planted."""
    steps: ClassVar[int] = 12
    """Batches of an epoch: enough that a loop has proven compiled code and runs it, or has captured a step."""
    rtol: ClassVar[float] = 1e-5
    atol: ClassVar[float] = 1e-6

    # -- what an integration says ----------------------------------------------------------------------------------

    def fit(self, task: Task) -> Fitted:
        """Fit the task's model with the framework, and with hotloop where ``task.run`` asks for it.

        Optimizer and learning rate are the integration's choice, and the same with hotloop and without.
        """
        raise NotImplementedError(f"{type(self).__name__}.fit: say how your framework fits a Task")

    def saved(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Read the model's part of a checkpoint that ``fit`` wrote to ``task.save``."""
        raise NotImplementedError(f"{type(self).__name__}.saved: say how your framework's checkpoints are read")

    def model(self) -> nn.Module:
        """Make a model; random numbers are seeded before. Override it where the framework wants models of its own."""
        return SmallClassifier()

    def batches(self, count: int, *, ragged: bool = False) -> list[Any]:
        """Give batches as the model takes them, the last one short if ``ragged``; the same ones at every call."""
        return list(small_batches(count, ragged=ragged))

    def broken(self) -> Any:
        """Give a batch on which the model itself raises, compiled or not."""
        ids, labels = self.batches(1)[0]
        return torch.stack([ids, ids], 1), labels

    # -- the tests -------------------------------------------------------------------------------------------------

    def test_same_result(self) -> None:
        """Losses, parameters, buffers and optimizer state are those of the framework's own eager run."""
        self._compiles_as_eager()

    def test_same_result_with_accumulation(self) -> None:
        """The same holds with gradient accumulation."""
        self._compiles_as_eager(accumulate=2)

    def test_clean_keys(self) -> None:
        """Names in ``state_dict`` and in checkpoints are eager's."""
        with self._folder() as folder:
            eager = self._fit(save=folder / "eager")
            ours = self._fit(run=self.run, save=folder / "ours")
            expected, found = self.saved(folder / "eager"), self.saved(folder / "ours")
            _same_names("the checkpoint", expected, found)
            _same_names("state_dict()", eager.model.state_dict(), ours.model.state_dict())
            for name, value in expected.items():
                self._close(f"{name} in the checkpoint", value, found[name])

    def test_saved_compiled_resumes_eager(self) -> None:
        """A checkpoint that a compiled run saved is resumed by an eager one, to eager's result."""
        self._resumes(first=self.run, then=None)

    def test_saved_eager_resumes_compiled(self) -> None:
        """A checkpoint that an eager run saved is resumed by a compiled one, to eager's result."""
        self._resumes(first=None, then=self.run)

    def test_failing_compile_of_a_forward(self) -> None:
        """A forward that cannot be compiled changes neither the run nor its result, and the status says why."""
        self._survives("forward compile", after=0)

    def test_failing_compile_of_a_backward(self) -> None:
        """The same holds for a backward."""
        self._survives("backward compile", after=0)

    def test_failing_run_of_a_forward(self) -> None:
        """Compiled code that fails while its forward runs is undone, and the step runs eagerly."""
        self._undoes("test_failing_run_of_a_forward", "forward run")

    def test_failing_run_of_a_backward(self) -> None:
        """The same holds for a backward."""
        self._undoes("test_failing_run_of_a_backward", "backward run")

    def test_no_recompile_storm(self) -> None:
        """A short last batch and validation after each of three epochs compile at most once more each."""
        batches, validation = self.batches(self.steps, ragged=True), self.batches(3, ragged=True)
        eager = self._fit(batches=batches, validation=validation, epochs=3)
        with assert_max_recompiles(2):
            ours = self._fit(run=self.run, batches=batches, validation=validation, epochs=3)
        self._same(eager, ours)

    def test_captured_step(self) -> None:
        """Whole steps are captured and replayed, to eager's result; where they cannot be, the status says why."""
        eager = self._eager(epochs=2)
        with captured_step_emulation() if self.device == "cpu" else contextlib.nullcontext():
            ours = self._fit(run="eager+graph", epochs=2)
        self._same(eager, ours)
        told = said(ours)
        limit = self.limits.get("test_captured_step")
        if limit is not None:
            check(limit in told, f"the status does not say why no step is captured: {limit!r} is not in {told}")
            return
        check("eager+graph" in told, f"no tier eager+graph in the status: {told}")
        assert ours.record is not None
        captured = [one for one in ours.record.document["events"] if one["kind"] == ev.Captured.kind]
        check(bool(captured), f"no step was captured: {told}")

    def test_python_that_a_step_reads(self) -> None:
        """What a callback sets in Python between two steps is read by the next, compiled and captured ones too."""
        for run in self._runs():
            eager, ours = (self._fit_with_python(one, changes=2 * self.steps // 3)[0] for one in (None, run))
            self._same(eager, ours)

    def test_python_that_a_step_counts(self) -> None:
        """What a step counts in Python counts each batch once; where it stays eager for that, the status says so."""
        for run in self._runs():
            eager, expected = self._fit_with_python(None, counting=True)
            check(expected.steps == self.steps, f"eager counts {expected.steps} steps in {self.steps} batches")
            with watch() as seen:
                ours, found = self._fit_with_python(run, counting=True)
            self._same(eager, ours)
            told = said(ours)
            check(found.steps == self.steps, f"run={run!r} counts {found.steps} steps in {self.steps} batches: {told}")
            made = [one for one in seen if isinstance(one, ev.Captured if "+graph" in run else ev.Compiled)]
            why = self.limits.get("test_captured_step", "changes Python state") if "+graph" in run else "Python state"
            check(bool(made) or why in told, f"run={run!r} ran eager, and {why!r} is not in the status: {told}")

    def test_status_and_record(self) -> None:
        """The status says what was asked for and what runs; the record holds the same, and can be read back."""
        with watch() as seen:
            ours = self._fit(run=self.run)
        data = json.loads(json.dumps(ours.status.to_dict()))
        check(self.run in json.dumps(data), f"the status does not name {self.run!r}, which was asked for: {data}")
        check(self.run in str(ours.status), f"str(status) does not name {self.run!r}: {ours.status}")
        check(any(isinstance(one, ev.Compiled) for one in seen), f"nothing was compiled: {ours.status}")
        if ours.record is not None:
            document = ours.record.document
            compiles = sum(one["compiles"] for one in document["components"].values())
            check(compiles > 0, f"the record tells of no compile: {document['components']}")
            check(bool(document["steps"]), "the record has no steps")

    def test_disabled(self) -> None:
        """``HOTLOOP_DISABLE=1`` leaves everything eager, and the status says so."""
        eager = self._eager()
        with _environment("HOTLOOP_DISABLE", "1"), watch() as seen:
            ours = self._fit(run=self.run)
        self._same(eager, ours)
        check(not [one for one in seen if isinstance(one, ev.Compiled)], "something was compiled")
        check("HOTLOOP_DISABLE" in said(ours), f"the status does not say why all is eager: {said(ours)}")

    def test_removal(self) -> None:
        """Taken off, the model is as it was: nothing compiled, no attribute more, no hook more, eager's output."""
        model = self._model()
        before = inventory(model)
        ours = self._fit(run=self.run, model=model)
        check(ours.model is model, "Fitted.model is not the task's model")
        ours.remove()
        after = inventory(model)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        check(not changed, f"left behind: {sorted(changed)}")
        copied = copy.deepcopy(model)
        _same_names("a copy", model.state_dict(), copied.state_dict())

    def test_two_fits(self) -> None:
        """Two fits in one process are as good as the first, and the second compiles nothing that the first did."""
        eager = self._eager()
        forget_compiled_code()
        counts = []
        for _ in range(2):
            with watch() as seen:
                ours = self._fit(run=self.run, fresh=False)
            self._same(eager, ours)
            counts.append(sum(isinstance(one, ev.Compiled) for one in seen))
            ours.remove()
        check(counts[0] > 0, "the first fit compiled nothing")
        check(counts[1] == 0, f"the second fit compiled {counts[1]} graphs again")

    def test_exceptions_of_the_user(self) -> None:
        """An exception of the model's own reaches the user as eager raises it."""
        batches = [*self.batches(self.steps), self.broken()]
        raised = []
        for run in (None, self.run):
            try:
                self._fit(run=run, batches=batches)
            except Exception as error:  # noqa: BLE001 - whatever eager raises
                raised.append(error)
        check(len(raised) == 2, f"{2 - len(raised)} of two runs raised nothing")  # noqa: PLR2004 - eager and ours
        eager, ours = raised
        check(type(eager) is type(ours), f"eager raises {eager!r}, compiled code {ours!r}")
        check(str(eager) == str(ours), f"eager says {eager}, compiled code {ours}")

    # -- what the tests are made of --------------------------------------------------------------------------------

    def _model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.model().to(self.device)

    def _fit(
        self, *, run: str | None = None, model: nn.Module | None = None, fresh: bool = True, **settings: Any
    ) -> Fitted:
        """Fit from the same random state each time; ``fresh`` forgets what was compiled before."""
        if fresh:
            forget_compiled_code()
        model = self._model() if model is None else model
        batches = settings.pop("batches", None) or self.batches(self.steps)
        settings["validation"] = placed(settings.get("validation", ()), self.device)
        torch.manual_seed(2)
        return self.fit(
            Task(model=model, batches=placed(batches, self.device), run=run, device=self.device, **settings)
        )

    def _runs(self) -> list[str]:
        """Name what a program is asked to run as: compiled; captured too where anybody captures here."""
        return [self.run] if self.test_captured_step is None else [self.run, "eager+graph"]

    def _fit_with_python(
        self, run: str | None, *, changes: int | None = None, counting: bool = False
    ) -> tuple[Fitted, SimpleNamespace]:
        """Fit a program that keeps Python state, captured by the stand-in where a capture is asked for.

        After ``changes`` batches, what the step reads is set to something else, and the model's dropout switched off.
        """
        model, python, begun = self._model(), plain_python(counting=counting), 0
        drops = [one for one in model.modules() if isinstance(one, nn.Dropout)]

        def begin() -> None:
            nonlocal begun
            if begun == changes:
                python.weight = 0.25
                for one in drops:
                    one.p = 0.0
            begun += 1

        stand_in = self.device == "cpu" and run is not None and "+graph" in run
        with captured_step_emulation() if stand_in else contextlib.nullcontext():
            fitted = self._fit(run=run, model=model, python=python, begin=begin)
        check(begun == self.steps, f"Task.begin was called {begun} times in {self.steps} batches")
        return fitted, python

    def _eager(self, **settings: Any) -> Fitted:
        """Fit eagerly; what many tests compare with is fitted once a suite."""
        kept = _eager_fits[type(self)]
        key = tuple(sorted(settings.items()))
        if key not in kept:
            kept[key] = self._fit(**settings)
        return kept[key]

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)

    def _compiles_as_eager(self, **settings: Any) -> None:
        eager = self._eager(**settings)
        with watch() as seen:
            ours = self._fit(run=self.run, **settings)
        check(any(isinstance(one, ev.Compiled) for one in seen), f"nothing was compiled: {said(ours)}")
        self._same(eager, ours)

    def _resumes(self, *, first: str | None, then: str | None) -> None:
        with self._folder() as folder:
            self._fit(save=folder / "eager")
            eager = self._fit(resume=folder / "eager", epochs=2)
            self._fit(run=first, save=folder / "ours")
            ours = self._fit(run=then, resume=folder / "ours", epochs=2)
        check(len(eager.losses) == self.steps, f"a resumed run took {len(eager.losses)} batches, not {self.steps}")
        self._same(eager, ours)

    def _survives(self, stage: Stage, *, after: int) -> None:
        eager = self._eager()
        with planted_failure(stage, after=after) as planted, watch() as seen:
            ours = self._fit(run=self.run, fresh=False)
        check(planted.fired > 0, f"nothing failed in {stage}, so nothing was tested")
        self._same(eager, ours)
        told = f"{said(ours)} {[one.to_dict() for one in seen]}"
        check(TELLS in told, f"neither status nor events tell of the failure in {stage}: {told}")

    def _undoes(self, test: str, stage: Stage) -> None:
        if test not in self.limits:
            self._survives(stage, after=self.steps // 2 - 1)
            return
        raised: CompiledRunError | None = None
        with planted_failure(stage, after=self.steps // 2 - 1) as planted:
            try:
                self._fit(run=self.run, fresh=False)
            except CompiledRunError as error:
                raised = error
        check(planted.fired > 0, f"nothing failed in {stage}, so nothing was tested")
        check(raised is not None, f"a failure in {stage} was neither undone nor raised")
        check(TELLS in str(raised) and "checkpoint" in str(raised), f"cause or remedy is missing: {raised}")

    def _same(self, eager: Fitted, ours: Fitted) -> None:
        """Compare two fits: losses, parameters and buffers, optimizer state."""
        check(len(eager.losses) == len(ours.losses), f"{len(eager.losses)} losses of eager's, {len(ours.losses)} ours")
        self._close("losses", torch.tensor(list(eager.losses)), torch.tensor(list(ours.losses)))
        expected, found = eager.model.state_dict(), ours.model.state_dict()
        _same_names("state_dict()", expected, found)
        for name, value in expected.items():
            self._close(name, value, found[name])
        if eager.optimizer is not None and ours.optimizer is not None:
            _same_names("the optimizer's state", flat(eager.optimizer), flat(ours.optimizer))
            for name, value in flat(eager.optimizer).items():
                self._close(f"optimizer {name}", value, flat(ours.optimizer)[name])

    def _close(self, name: str, expected: Any, found: Any) -> None:
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(
                found, expected, rtol=self.rtol, atol=self.atol, msg=lambda why: f"{name} is not as in eager: {why}"
            )
        else:
            check(expected == found, f"{name} is {found!r}, and {expected!r} in eager")


def _same_names(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    more, fewer = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    check(not more and not fewer, f"names of {what}: {more} are not eager's, {fewer} are missing")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    with mock.patch.dict(os.environ, {name: value}):
        yield
