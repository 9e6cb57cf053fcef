"""The loop of a user's own program: its steps as it wrote them, with record, checkpoints and compile as in any run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from hotloop.cache import shared_compiles
from hotloop.compiling.observe import watch
from hotloop.errors import ConfigError, RunPrunedError, TrainingFailedError
from hotloop.measure import machine
from hotloop.record import RunRecord
from hotloop.step import Loop
from hotloop.step.calls.preview import generators_of
from hotloop.step.workload import arguments
from hotloop.train import checkpoint, compiling, configure, dry, environment, failures, opening
from hotloop.train.account import Account
from hotloop.train.automatic import Automatic
from hotloop.train.checkpoint import Position
from hotloop.train.compiling import Compiling
from hotloop.train.interrupt import Interrupt
from hotloop.train.outcome import Live, Outcome
from hotloop.train.own_task import OwnTask, by_model, figures_of, judge, loss_of, rate_of
from hotloop.train.rehearse import OwnRehearsal, Plan
from hotloop.train.saving import Checkpoints
from hotloop.train.tracking import Tracking
from hotloop.train.turn import hold_again

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from hotloop.events import Event
    from hotloop.train.display import Display
    from hotloop.train.start import Start

SMALLER = "smaller batches in the program, or bfloat16 autocast in its step"
_NO_MORE = object()
_TIMED = 200
"""The newest times of what is before a step, of which the median is told."""


def fit(task: OwnTask, start: Start, chosen: Plan, display: Display) -> Outcome:
    """Train a program, to its end or until somebody interrupts.

    Raises:
        TrainingFailedError: the run cannot go on (NaN, memory); the message says why and how to resume.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(start.open)
        if start.dry:
            return dry.own(task, start, chosen, display, task.steps(start.settings.training))
        record = stack.enter_context(RunRecord(start.folder, hold_again))
        opening.write(start, task.told, record, display)
        record.update("measurements", **({"goal": str(task.goal)} if task.goal else {}), **task.context)
        record.update("environment", **machine.describe(task.device))
        auto = start.settings.training.optimization.use_torch_compile == "auto"
        events = stack.enter_context(watch()) if chosen or auto else []
        if chosen or auto:
            stack.enter_context(shared_compiles(*task.workload.models().values()))
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(display)
        fitting = _Fitting(task, start, chosen, display, Live(record, events, interrupt))
        stack.callback(fitting.compiling.close)
        if start.resume:
            fitting.restore(start.resume)
        outcome = fitting.run()
        if outcome.status == "interrupted":
            record.finish("interrupted", f"{interrupt.signal} at step {outcome.step}")
    return dataclasses.replace(outcome, stop=interrupt.signal is not None)


class _Fitting:
    """One run on its way."""

    def __init__(self, task: OwnTask, start: Start, chosen: Plan, display: Display, live: Live) -> None:
        self.task, self.start, self.display = task, start, display
        self.record, self.interrupt = live.record, live.interrupt
        self.settings, self.training, self.folder = start.settings, start.settings.training, start.folder
        self.position, self.began, self.doing = Position(), time.monotonic(), "start"
        self.steps_per_epoch = task.steps_per_epoch(self.training) or 2**62
        self.total = task.steps(self.training)
        self.events, self.seen = live.events, len(live.events)
        self.parts: dict[str, Any] = dict(task.workload.models())
        by_component = by_model(chosen, task.workload)
        compiling = Compiling(
            by_component, self.settings, self.parts, display.say, steps=self.total, rehearsal=self.rehearsal()
        )
        auto = self.training.optimization.use_torch_compile == "auto"
        self.automatic = self.make_automatic(compiling) if auto else None
        self.compiling = self.automatic or compiling
        self.account = Account(self.record, task.per_step)
        self.tracking = Tracking(start, self.record, display.say)
        self.checkpoints = Checkpoints(start, display.say, live.interrupt)
        self.epoch_began: dict[str, Any] = {}
        self.exhausted = False
        self.ready_seconds: deque[float] = deque(maxlen=_TIMED)
        self.optimizers = list(task.workload.holdings().optimizers.values())
        self.untouched: list[float] | None = self.weights()

    def make_automatic(self, between: Compiling) -> Automatic:
        """Hand the program's step to a hot loop, and what is asked for between the steps to ``between``."""
        workload = self.task.workload
        loop = Loop(
            workload.model, workload.optimizer, state=workload.state, run="auto", total_steps=self.total,
            runs=max(1.0, self.start.within.runs), workload=self.task.factory, record=self.record,
        )  # fmt: skip
        return Automatic(self.settings, self.parts, self.display.say, loop, workload.step, between=between)

    def rehearsal(self) -> Callable[[], OwnRehearsal] | None:
        """Return what tries CUDA graphs on a program made anew before they are turned on; None where it cannot be."""
        task, more = self.task, compiling.arguments(self.settings.compile)
        if task.make is None:
            return None
        make, workload = task.make, task.workload
        return lambda: OwnRehearsal(make=make, workload=workload, device=task.device, more=more, events=self.events)

    def run(self) -> Outcome:
        """Train to the end, or until somebody interrupts."""
        self.compiling.announce()
        self.display.begin(self.total, self.position.step)
        status = "failed"
        try:
            while not self.over():
                for batch in self.rest_of_epoch():
                    self.step(batch)
                    if self.interrupt.signal:
                        outcome = self.interrupted()
                        status = "interrupted"
                        return outcome
                    due = self.position.step % (self.training.checkpoint_every_steps or self.total + 1) == 0
                    if due or self.checkpoints.is_due():
                        with self.account.aside():
                            self.save(checkpoint.LAST)
                with self.account.aside():
                    self.validate()
            self.checkpoints.check(self.save, self.position.step)
            status = "finished"
        except RunPrunedError:
            status = "pruned"
            raise
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Exception as error:
            failure = failures.explain(error, SMALLER)
            if failure is None:
                raise
            last = self.folder / checkpoint.FOLDER / checkpoint.LAST
            again = self.start.within.resume
            raise failures.with_checkpoint(failure, self.doing, self.folder, last, again) from error
        finally:
            self.settle()
            self.tracking.close(status)
        return self.outcome("finished")

    def over(self) -> bool:
        """Say whether there is nothing left to do: all steps done and validated, or early stopping."""
        patience = self.training.early_stopping_patience
        stopped = self.task.goal is not None and patience is not None and self.position.stale >= patience
        return stopped or self.position.step == self.position.validated_step >= self.total

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the batches that are left of this epoch, up to the run's last step.

        Those that an earlier start has trained on are read again and left out: the epoch begins with the random numbers
        that it began with then, and goes on with those that the checkpoint has.
        """
        at, now = self.position, checkpoint.random_state()
        if at.step_in_epoch:
            checkpoint.restore_random_state(self.epoch_began["random"])
            for generator, state in zip(self.generators(), self.epoch_began["loader"], strict=True):
                generator.set_state(state)
        else:
            self.epoch_began = {"random": now, "loader": [one.get_state() for one in self.generators()]}
        source, self.exhausted = self.task.workload.read(), False
        for _ in range(at.step_in_epoch):
            next(source, None)
        if at.step_in_epoch:
            checkpoint.restore_random_state(now)
        while at.step < self.total:
            batch = next(source, _NO_MORE)
            if batch is _NO_MORE:
                self.exhausted = True
                break
            yield self.ready(batch)
        if self.exhausted and not at.step_in_epoch:
            raise ConfigError(
                f"recipe={self.task.name}: there are no batches in epoch {at.epoch + 1}: give the Workload a list, a "
                "DataLoader, or a function that makes an iterable"
            )

    def ready(self, batch: Any) -> Any:
        """Make a batch ready for its step, outside of it."""
        if self.task.workload.before is None:
            return batch
        self.doing = f"what is before step {self.position.step + 1}"
        began = time.perf_counter()
        with self.compiling.validating():
            ready = self.task.workload.ready(batch)
        self.ready_seconds.append(time.perf_counter() - began)
        return ready

    def generators(self) -> list[torch.Generator]:
        """Return the generators of a loader that has its own."""
        return generators_of(self.task.workload.batches)

    def step(self, batch: Any) -> None:
        """Do one of the program's steps and write it down."""
        self.doing = f"step {self.position.step + 1}"
        was_applied = self.compiling.applied
        self.compiling.before_step()
        starts = self.compiling.applied and not was_applied if self.compiling.chosen else self.account.idle
        if starts:
            self.account.starts()
            self.display.running(self.compiling.running)
        rate = rate_of(self.optimizers)
        began = time.perf_counter()
        workload = self.task.workload
        result = self.automatic.step(*arguments(batch)) if self.automatic else workload.run(batch)
        loss = loss_of(result)  # waits for the device, behind the step, where the step gives a loss
        others = figures_of(result)
        seconds = time.perf_counter() - began
        events = self.new_events()
        self.compiling.after_step(seconds, 1, events)
        self.position.step += 1
        self.position.step_in_epoch += 1
        found = {**({} if loss is None else {"loss": loss}), **others}
        if workload.before is not None:
            found["ready_seconds"] = self.ready_seconds[-1]
        entry = {
            "step": self.position.step, "seconds": seconds, **found, **rate, "running": self.compiling.running,
        }  # fmt: skip
        self.account.step(entry, events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))
        self.display.step(entry)
        self.tracking.log({**found, **rate}, self.position.step)
        if loss is not None and not math.isfinite(loss):
            at = f" at learning rate {rate['learning_rate']:.3g}" if rate else ""
            raise TrainingFailedError(
                f"the loss is {loss}{at}; the step was applied, so the parameters are lost, and no checkpoint holds "
                "them. Try a lower learning rate, or clipped gradients, in the program"
            )

    def new_events(self) -> list[Event]:
        """Return what was observed since this was last asked."""
        found = self.events[self.seen :]
        self.seen += len(found)
        return found

    def validate(self) -> None:
        """Judge the model where the program has metrics, keep it where it is the best so far, and begin a new epoch."""
        at = self.position
        self.doing = f"metrics after step {at.step}"
        self.check_moved()
        metrics = self.metrics()
        goal = self.task.goal
        best = goal is not None and goal.better(metrics, at.best)
        at.validated_step, at.stale = at.step, 0 if best else at.stale + 1
        if best:
            at.best_step, at.best = at.step, metrics
        if metrics:
            self.account.validated(at.step, at.epoch + 1, metrics)
            self.tracking.log({f"validation_{name}": value for name, value in metrics.items()}, at.step)
            self.display.validated(at.step, metrics, best=best)
        if self.exhausted or at.step_in_epoch >= self.steps_per_epoch:
            at.epoch, at.step_in_epoch = at.epoch + 1, 0
        for name in (checkpoint.BEST, checkpoint.LAST) if best else (checkpoint.LAST,):
            self.save(name)
        self.settle()
        self.start.within.validated(at.step, at.epoch, metrics)

    def metrics(self) -> dict[str, float]:
        """Return the program's metrics, none where it has none.

        Raises:
            ConfigError: that of ``recipe.goal`` is not among them.
        """
        if self.task.workload.metrics is None:
            return {}
        with self.compiling.validating():
            found = judge(self.task.workload)
        events = self.new_events()
        self.compiling.after_validation(events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))
        self.task.check_goal(found)
        return found

    def check_moved(self) -> None:
        """Say where an epoch has changed no parameter: a step that forgets its optimizer trains nothing."""
        if self.untouched is not None and self.untouched == self.weights():
            self.display.say(
                f"No parameter of {self.task.name} has changed since the start: does its step call backward() and "
                "optimizer.step()?"
            )
        self.untouched = None

    def weights(self) -> list[float]:
        """Return one number for each parameter that an optimizer, or without one the program, trains."""
        held = [one for each in self.optimizers for group in each.param_groups for one in group["params"]]
        held = held or [one for one in self.task.workload.holdings().parameters().values() if one.requires_grad]
        return [float(one.detach().double().abs().sum()) for one in held]

    @property
    def again(self) -> str:
        """The command that goes on with the run, or with the search that it is part of."""
        return self.start.within.resume or configure.again(self.folder)

    def interrupted(self) -> Outcome:
        """Save, and say how to go on."""
        self.save(checkpoint.LAST)
        self.checkpoints.check(self.save, self.position.step)
        self.display.say(f"Interrupted at step {self.position.step} of {self.total}, and saved.")
        self.display.say(f"Resume with: {self.again}")
        return self.outcome("interrupted")

    def save(self, name: str) -> None:
        """Write a checkpoint."""
        document = {
            "model": {name: model.state_dict() for name, model in self.task.workload.models().items()},
            "others": {name: one.state_dict() for name, one in self.task.others().items()},
            "position": dataclasses.asdict(self.position),
            "data": self.task.fingerprint,
            "epoch_began": self.epoch_began,
            "random": checkpoint.random_state(),
            "settings": configure.to_dict(self.settings),
            "loop": self.compiling.state_dict(),
            "record": self.record.lengths(),
        }
        self.checkpoints.save(name, document)

    def restore(self, document: dict[str, Any]) -> None:
        """Go back to where a checkpoint was written.

        Raises:
            ConfigError: the program makes other models, optimizers or state than it did then.
        """
        self.task.load_models(document["model"])
        others = self.task.others()
        if set(others) != set(document["others"]):
            raise ConfigError(
                f"the checkpoint holds {', '.join(document['others'])} beside the models; "
                f"recipe={self.task.name} makes {', '.join(others)}: its program has changed since"
            )
        for name, one in others.items():
            one.load_state_dict(document["others"][name])
        self.position, self.epoch_began = Position(**document["position"]), document["epoch_began"]
        self.compiling.resumed(self.position.step, document.get("loop"))
        self.untouched = self.weights()
        checkpoint.restore_random_state(document["random"])

    def settle(self) -> None:
        """Bring the record's components and measurements up to date."""
        status, figures = self.compiling.status(), self.compiling.figures()
        if self.ready_seconds:
            figures["before_step_ms"] = 1000 * statistics.median(self.ready_seconds)
        self.account.settle(status, environment.peak_memory(self.task.device), figures)
        self.tracking.compiled(status, figures, self.position.step)

    def outcome(self, status: str) -> Outcome:
        """Sum the run up."""
        at, seconds = self.position, time.monotonic() - self.began
        measured = dict(self.record.document["measurements"])
        components, notes = self.compiling.status(), tuple(self.compiling.summary())
        remarks = tuple(self.task.remarks(components))
        return Outcome(
            status, self.folder, at.step, at.best_step, at.best, components, measured, seconds, notes, remarks
        )
