"""A test suite for every integration: hotloop's promises, checked against the framework's own eager run.

An integration's tests subclass `Conformance`, define how their framework fits a `Task`, and inherit the tests::

    class TestMyTrainer(Conformance):
        def fit(self, task): ...
        def saved(self, path): ...

If a framework's hooks make a promise impossible, ``limits`` declares so, with the reason. The test then checks what is
promised instead.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
from fitting import (
    Fitted,
    SmallClassifier,
    Task,
    flatten,
    inventory,
    plain_python,
    small_batches,
    to_device,
)
from torch import nn

from hotloop import events as ev
from hotloop.compiling.observe import watch
from hotloop.errors import CompiledRunError
from hotloop.testing.assertions import assert_max_recompiles
from hotloop.testing.captured import captured_step_emulation
from hotloop.testing.planted import MESSAGE, Stage, forget_compiled_code, planted_failure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import SimpleNamespace


class Conformance:
    """The promises that every integration keeps, as tests; each test's docstring is a promise."""

    limits: ClassVar[Mapping[str, str]] = {}
    """Promises that the framework's hooks do not allow, by the test's name, with the reason."""
    device: ClassVar[str] = "cpu"
    """The device of models and batches: on ``"cuda"`` steps are captured in CUDA graphs, else by an emulation."""
    run: ClassVar[str] = "aot_eager"
    """The tier or preset of tests that capture nothing; failures are planted into code that `aot_eager` compiles."""
    steps: ClassVar[int] = 12
    """Batches of an epoch: enough that a loop has proven compiled code and runs it, or has captured a step."""
    rtol: ClassVar[float] = 1e-5
    atol: ClassVar[float] = 1e-6
    _eager_fits: ClassVar[dict[Any, Fitted]] = {}
    """The eager fits that many tests compare with, by suite and settings."""

    # -- what an integration defines -------------------------------------------------------------------------------

    def fit(self, task: Task) -> Fitted:
        """Fit the task's model with the framework, and with hotloop where ``task.run`` asks for it.

        Optimizer and learning rate are the integration's choice, and the same with hotloop and without.
        """
        raise NotImplementedError(f"{type(self).__name__}.fit: say how your framework fits a Task")

    def saved(self, path: Path) -> Mapping[str, torch.Tensor]:
        """Read the model's part of a checkpoint that ``fit`` wrote to ``task.save``."""
        raise NotImplementedError(f"{type(self).__name__}.saved: say how your framework's checkpoints are read")

    def model(self) -> nn.Module:
        """Make a model; random numbers are seeded before. Override it if the framework needs its own kind of model."""
        return SmallClassifier()

    def batches(self, count: int, *, ragged: bool = False) -> list[Any]:
        """Return batches as the model takes them, the last one short if ``ragged``; the same ones at every call."""
        return list(small_batches(count, ragged=ragged))

    def broken(self) -> Any:
        """Return a batch on which the model itself raises, compiled or not."""
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
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            eager = self._fit(save=folder / "eager")
            ours = self._fit(run=self.run, save=folder / "ours")
            self._same_values("the checkpoint", self.saved(folder / "eager"), self.saved(folder / "ours"))
            self._same_values("state_dict()", eager.model.state_dict(), ours.model.state_dict())

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
        told = ours.text()
        limit = self.limits.get("test_captured_step")
        if limit is not None:
            _check(limit in told, f"the status does not say why no step is captured: {limit!r} is not in {told}")
            return
        _check("eager+graph" in told, f"no tier eager+graph in the status: {told}")
        assert ours.record is not None
        captured = [event for event in ours.record.document["events"] if event["kind"] == ev.Captured.kind]
        _check(bool(captured), f"no step was captured: {told}")

    def test_python_that_a_step_reads(self) -> None:
        """What a callback sets in Python between two steps is read by the next, compiled and captured ones too."""
        for run in self._runs():
            eager, _ = self._fit_with_python(None, changes=2 * self.steps // 3)
            ours, _ = self._fit_with_python(run, changes=2 * self.steps // 3)
            self._same(eager, ours)

    def test_status_and_record(self) -> None:
        """The status says what was asked for and what runs; the record holds the same, and can be read back."""
        with watch() as seen:
            ours = self._fit(run=self.run)
        data = json.loads(json.dumps(ours.status.to_dict()))
        _check(self.run in json.dumps(data), f"the status does not name {self.run!r}, which was asked for: {data}")
        _check(self.run in str(ours.status), f"str(status) does not name {self.run!r}: {ours.status}")
        _check(any(isinstance(event, ev.Compiled) for event in seen), f"nothing was compiled: {ours.status}")
        if ours.record is not None:
            document = ours.record.document
            compiles = sum(part["compiles"] for part in document["components"].values())
            _check(compiles > 0, f"the record tells of no compile: {document['components']}")
            _check(bool(document["steps"]), "the record has no steps")

    def test_disabled(self) -> None:
        """``HOTLOOP_DISABLE=1`` leaves everything eager, and the status says so."""
        eager = self._eager()
        with mock.patch.dict(os.environ, {"HOTLOOP_DISABLE": "1"}), watch() as seen:
            ours = self._fit(run=self.run)
        self._same(eager, ours)
        _check(not [event for event in seen if isinstance(event, ev.Compiled)], "something was compiled")
        _check("HOTLOOP_DISABLE" in ours.text(), f"the status does not say why all is eager: {ours.text()}")

    def test_removal(self) -> None:
        """Taken off, the model is as it was: nothing compiled, no attribute more, no hook more, eager's output."""
        model = self._model()
        before = inventory(model)
        ours = self._fit(run=self.run, model=model)
        _check(ours.model is model, "Fitted.model is not the task's model")
        ours.remove()
        after = inventory(model)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        _check(not changed, f"left behind: {sorted(changed)}")
        copied = copy.deepcopy(model)
        self._same_values("a copy", model.state_dict(), copied.state_dict())

    def test_exceptions_of_the_user(self) -> None:
        """An exception of the model's own reaches the user as eager raises it."""
        batches = [*self.batches(self.steps), self.broken()]
        raised = []
        for run in (None, self.run):
            try:
                self._fit(run=run, batches=batches)
            except Exception as error:
                raised.append(error)
        _check(len(raised) == 2, f"{2 - len(raised)} of two runs raised nothing")
        eager, ours = raised
        _check(type(eager) is type(ours), f"eager raises {eager!r}, compiled code {ours!r}")
        _check(str(eager) == str(ours), f"eager says {eager}, compiled code {ours}")

    # -- how the tests do it ---------------------------------------------------------------------------------------

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
        settings["validation"] = to_device(settings.get("validation", ()), self.device)
        torch.manual_seed(2)
        return self.fit(
            Task(model=model, batches=to_device(batches, self.device), run=run, device=self.device, **settings)
        )

    def _runs(self) -> list[str]:
        """List the tiers to test a program in: compiled, and captured unless the suite captures nothing."""
        return [self.run] if self.test_captured_step is None else [self.run, "eager+graph"]

    def _fit_with_python(self, run: str | None, *, changes: int | None = None) -> tuple[Fitted, SimpleNamespace]:
        """Fit a program that keeps Python state.

        After ``changes`` batches, the value that the step reads is changed, and the model's dropout switched off.
        """
        model, python, begun = self._model(), plain_python(), 0
        drops = [module for module in model.modules() if isinstance(module, nn.Dropout)]

        def begin() -> None:
            nonlocal begun
            if begun == changes:
                python.weight = 0.25
                for drop in drops:
                    drop.p = 0.0
            begun += 1

        emulated = self.device == "cpu" and run is not None and "+graph" in run
        with captured_step_emulation() if emulated else contextlib.nullcontext():
            fitted = self._fit(run=run, model=model, python=python, begin=begin)
        _check(begun == self.steps, f"Task.begin was called {begun} times in {self.steps} batches")
        return fitted, python

    def _eager(self, **settings: Any) -> Fitted:
        """Fit eagerly, once a suite for the same settings."""
        key = type(self), tuple(sorted(settings.items()))
        if key not in self._eager_fits:
            self._eager_fits[key] = self._fit(**settings)
        return self._eager_fits[key]

    def _compiles_as_eager(self, **settings: Any) -> None:
        eager = self._eager(**settings)
        with watch() as seen:
            ours = self._fit(run=self.run, **settings)
        _check(any(isinstance(event, ev.Compiled) for event in seen), f"nothing was compiled: {ours.text()}")
        self._same(eager, ours)

    def _resumes(self, *, first: str | None, then: str | None) -> None:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            self._fit(save=folder / "eager")
            eager = self._fit(resume=folder / "eager", epochs=2)
            self._fit(run=first, save=folder / "ours")
            ours = self._fit(run=then, resume=folder / "ours", epochs=2)
        _check(len(eager.losses) == self.steps, f"a resumed run took {len(eager.losses)} batches, not {self.steps}")
        self._same(eager, ours)

    def _survives(self, stage: Stage, *, after: int) -> None:
        eager = self._eager()
        with planted_failure(stage, after=after) as planted, watch() as seen:
            ours = self._fit(run=self.run, fresh=False)
        _check(planted.fired > 0, f"nothing failed in {stage}, so nothing was tested")
        self._same(eager, ours)
        told = f"{ours.text()} {[event.to_dict() for event in seen]}"
        _check(MESSAGE in told, f"neither status nor events tell of the failure in {stage}: {told}")

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
        _check(planted.fired > 0, f"nothing failed in {stage}, so nothing was tested")
        _check(raised is not None, f"a failure in {stage} was neither undone nor raised")
        _check(MESSAGE in str(raised) and "checkpoint" in str(raised), f"cause or remedy is missing: {raised}")

    def _same(self, eager: Fitted, ours: Fitted) -> None:
        """Compare two fits: losses, parameters and buffers, optimizer state."""
        _check(len(eager.losses) == len(ours.losses), f"{len(eager.losses)} losses of eager's, {len(ours.losses)} ours")
        self._close("losses", torch.tensor(list(eager.losses)), torch.tensor(list(ours.losses)))
        self._same_values("state_dict()", eager.model.state_dict(), ours.model.state_dict())
        if eager.optimizer is not None and ours.optimizer is not None:
            self._same_values("the optimizer's state", flatten(eager.optimizer), flatten(ours.optimizer))

    def _same_values(self, what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        more, fewer = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
        _check(not more and not fewer, f"names of {what}: {more} are not eager's, {fewer} are missing")
        for name, value in expected.items():
            self._close(f"{name} in {what}", value, found[name])

    def _close(self, name: str, expected: Any, found: Any) -> None:
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(
                found, expected, rtol=self.rtol, atol=self.atol, msg=lambda why: f"{name} is not as in eager: {why}"
            )
        else:
            _check(expected == found, f"{name} is {found!r}, and {expected!r} in eager")


def _check(holds: bool, message: str) -> None:
    """Assert in a module that pytest does not rewrite, with a message that shows the values."""
    if not holds:
        raise AssertionError(message)
