"""The fit loop: steps, validations, checkpoints and the run's record, from its first step or from where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from hotloop.cache import shared_cache, shared_compiles
from hotloop.compiling.observe import watch
from hotloop.errors import ConfigError, RunPrunedError, TrainingFailedError
from hotloop.measure import machine
from hotloop.record import RunRecord
from hotloop.step import Loop
from hotloop.train import checkpoint, closing, configure, dry, environment, failures, opening, sharding
from hotloop.train.account import Account
from hotloop.train.automatic import Automatic
from hotloop.train.checkpoint import Position
from hotloop.train.compiling import Compiling, arguments
from hotloop.train.feed import NO_MORE, Feed
from hotloop.train.interrupt import Interrupt
from hotloop.train.outcome import Live, Outcome
from hotloop.train.program import as_trained
from hotloop.train.ranks import check_shares
from hotloop.train.rehearse import unsafe
from hotloop.train.requests import Requests
from hotloop.train.saving import Checkpoints
from hotloop.train.start import write_settings
from hotloop.train.task import rate_of
from hotloop.train.tracking import Tracking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.events import Event
    from hotloop.train.display import Display
    from hotloop.train.start import Start
    from hotloop.train.task import Plan, Task

_TIMED = 200
"""The newest times of what is before a step, of which the median is told."""
_SHARED_OUT = "Set the loader up in the program: loader = fabric.setup_dataloaders(loader)"
_OF_PRECISION = {"scaler"}
"""What a checkpoint has beside the models that a resumed run may have, or lack: its precision may change."""


def fit(task: Task, start: Start, chosen: Plan, display: Display) -> Outcome:
    """Train a task, to its end or until somebody interrupts; its report is written however it ends.

    Args:
        task: what to train.
        start: the run's settings, its folder, and the checkpoint to go on from.
        chosen: what to compile, by `compiling.plan`.
        display: prints the run.

    Raises:
        ConfigError: the task does not fit its checkpoint, has no metrics where a search judges it by one, or another
            process trains in the folder.
        TrainingFailedError: the run cannot go on (NaN, memory); the message says why and how to resume.
    """
    if start.within.metric and task.workload.metrics is None:
        raise ConfigError(
            f"{start.within.metric}: recipe={task.name} has no metrics: give its Workload metrics=, a function that "
            "returns figures of the model"
        )
    write_settings(start, task.files)
    with closing.reported(start, display):
        outcome = _fit(task, start, chosen, display)
        closing.tell(outcome, display)
    return outcome


def _fit(task: Task, start: Start, chosen: Plan, display: Display) -> Outcome:
    with contextlib.ExitStack() as stack:
        stack.enter_context(start.open)
        if start.dry:
            return dry.check(task, start, chosen, display)
        display.say(f"Run: {start.folder}" + (", resumed" if start.resume else ""))
        record = stack.enter_context(RunRecord(start.folder if start.leads else None))
        opening.write(start, task.told, record, display)
        record.update("measurements", **({"goal": str(task.goal)} if task.goal else {}), **task.context)
        record.update("environment", **machine.describe(task.device))
        auto = start.settings.training.optimization.use_torch_compile == "auto"
        events = stack.enter_context(watch()) if chosen or auto else []
        if chosen or auto:
            if share := start.settings.cache.share:  # the others compile once the first process has taken what is there
                task.ranks.led(lambda: stack.enter_context(shared_cache(share, display.say)))
            stack.enter_context(shared_compiles(*task.workload.models().values()))
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(display)
        fitting = _Fitting(task, start, chosen, display, Live(record, events, interrupt))
        record.update("measurements", steps_total=fitting.total)
        stack.callback(fitting.compiling.close)
        if start.resume:
            with as_trained(task.name):
                fitting.restore(start.resume)
        outcome = fitting.run()
        if outcome.status == "interrupted":
            record.finish("interrupted", f"{interrupt.signal} at step {outcome.step}")
    return dataclasses.replace(outcome, stop=interrupt.signal is not None)


class _Fitting:
    """One run on its way: what it was given, what it made of that, and where it is."""

    def __init__(self, task: Task, start: Start, chosen: Plan, display: Display, live: Live) -> None:
        self.task, self.display, self.live, self.within = task, display, live, start.within
        self.ranks = task.ranks
        self.settings, self.training, self.folder = start.settings, start.settings.training, start.folder
        self.position, self.doing, self.began = Position(), "start", time.monotonic()
        self.steps_per_epoch = task.steps_per_epoch(self.training) or 2**62
        self.total = task.begin(self.training)
        self.feed, self.seen = Feed(task), len(live.events)
        compiling = Compiling(
            task.plan(chosen), self.settings, task.parts, display.say, steps=self.total,
            rehearsal=lambda plan: unsafe(task, plan, arguments(self.settings.compile), live.events))  # fmt: skip
        auto = self.training.optimization.use_torch_compile == "auto"
        self.automatic = self.make_automatic(compiling) if auto else None
        self.compiling = self.automatic or compiling
        self.account = Account(live.record, task.per_step)
        self.tracking = Tracking(start, live.record, display.say)
        self.checkpoints = Checkpoints(start, display.say)
        self.requests = Requests(start.folder if start.leads else None)
        self.ready_seconds: deque[float] = deque(maxlen=_TIMED)
        self.optimizers = list(task.workload.holdings().optimizers.values())

    def make_automatic(self, between: Compiling) -> Automatic:
        """Hand the step to a hot loop that counts earlier starts too; ``between`` has what needs no gradients."""
        workload = self.task.workload
        parts = workload.models().values() if self.task.compiled else ()
        loop = Loop(
            self.task.compiled or workload.model,
            workload.optimizer,
            state=[*parts, *self.task.wrappers, *workload.holdings().state],
            run="auto",
            total_steps=self.total,
            runs=max(1.0, self.within.runs),
            # Several processes compile nothing in the background, and the first one may yet have to write its file.
            workload=self.task.factory if self.ranks.size == 1 else None,
            layout=self.settings.compile.layout,
            sentinel=self.settings.compile.sentinel,
            record=self.live.record,
        )
        return Automatic(self.settings, self.task.parts, self.display.say, loop, workload.step, between=between)

    def run(self) -> Outcome:
        """Train to the end, or until somebody interrupts."""
        self.announce()
        status = "failed"
        try:
            while not self.over():
                for batch in self.rest_of_epoch():
                    self.step(batch)
                    wished, at = self.live.interrupt.signal is not None, self.position.step
                    due = self.checkpoints.is_due(at) or self.requests.asked()
                    stops, saves = self.ranks.any(wished, due)
                    if stops:
                        outcome = self.interrupted()
                        status = "interrupted"
                        return outcome
                    with self.account.aside():
                        if saves:
                            self.save(checkpoint.LAST)
                        self.show()
                with self.account.aside():
                    self.validate()
            self.show(last=True)
            self.check_saved()
            status = "finished"
        except (RunPrunedError, KeyboardInterrupt) as error:
            status = "pruned" if isinstance(error, RunPrunedError) else "interrupted"
            raise
        except Exception as error:
            failure = self.ranks.explain(error) or failures.explain(error, self.task.smaller)
            if failure is None:
                raise
            last = self.folder / checkpoint.FOLDER / checkpoint.LAST
            raise failures.with_checkpoint(failure, self.doing, self.folder, last, self.within.resume) from error
        finally:
            self.settle()
            self.tracking.close(status)
        return self.outcome("finished")

    def announce(self) -> None:
        """Say what will run, and from which step on, or that nothing is left to do."""
        self.compiling.announce()
        for line in self.task.lines:
            self.display.say(line)
        self.display.begin(self.total, self.position.step)
        if self.over():
            self.display.say(f"Nothing is left to train: the run ended at step {self.position.step} of {self.total}.")

    def over(self) -> bool:
        """Say whether there is nothing left to do: all steps done and validated, or early stopping."""
        patience = self.training.early_stopping_patience
        stopped = self.task.goal is not None and patience is not None and self.position.stale >= patience
        return stopped or self.position.step == self.position.validated_step >= self.total

    def rest_of_epoch(self) -> Iterator[Any]:
        """Yield the batches that are left of this epoch, up to the run's last step, each made ready for its step."""
        at, before = self.position, self.task.workload.before
        source = self.feed.epoch(at.epoch, at.step_in_epoch)
        while at.step < self.total and (batch := next(source, NO_MORE)) is not NO_MORE:
            if before is not None:
                self.doing = f"what is before step {at.step + 1}"
                began = time.perf_counter()
                with self.compiling.validating():
                    batch = self.task.workload.ready(batch)
                self.ready_seconds.append(time.perf_counter() - began)
            yield batch

    def step(self, batch: Any) -> None:
        """Do one step and write it down."""
        self.doing = f"step {self.position.step + 1}"
        if not self.position.step:
            check_shares(self.ranks, batch, _SHARED_OUT)
        was_applied = self.compiling.applied
        self.compiling.before_step()
        # The first step that runs as asked: compiled, or eager where that was asked.
        starts = self.compiling.applied and not was_applied if self.compiling.chosen else self.account.idle
        if starts:
            self.account.starts()
            self.display.running(self.compiling.running)
        self.task.advance()
        rate = rate_of(self.optimizers)
        began = time.perf_counter()
        found = rate | self.task.take(batch, self.automatic.step if self.automatic else None)
        seconds = time.perf_counter() - began
        if "loss" in found:
            found |= self.ranks.mean({"loss": found["loss"]})
        events = self.new_events()
        self.compiling.after_step(seconds, self.task.amount(batch), events)
        self.position.step += 1
        self.position.step_in_epoch += 1
        if self.ready_seconds:
            found["ready_seconds"] = self.ready_seconds[-1]
        entry = {"step": self.position.step, "seconds": seconds, **found, "running": self.compiling.running}
        self.account.step(entry, events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))
        self.display.step(entry)
        self.task.check_figures(found)  # behind the record, which has the step that ended the run
        self.tracking.step(found, self.position.step)

    def new_events(self) -> list[Event]:
        """Return what was observed since this was last asked."""
        found = self.live.events[self.seen :]
        self.seen += len(found)
        return found

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Run the models as validations do, in their own tier or presets, and record what is observed."""
        with self.compiling.validating():
            yield
        events = self.new_events()
        self.compiling.after_validation(events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))

    def show(self, *, last: bool = False) -> None:
        """Let the task show the model as it stands, where it is time to; where the disk is full the run goes on."""
        step, show = self.position.step, self.task.show
        make = show.due(step, last=last) if show else None
        if make is None:
            return
        self.doing = f"what is shown after step {step}"

        def shown() -> None:
            try:
                self.live.record.update("measurements", **make(step))
            except OSError as error:
                self.display.say(f"{error}; the run goes on without it")

        with self.judging(), checkpoint.random_state_kept():
            self.ranks.led(shown)

    def validate(self) -> None:
        """Judge the model where there are metrics, keep it where it is the best so far, and begin a new epoch."""
        at, goal = self.position, self.task.goal
        self.doing = f"validation at step {at.step}"
        metrics = self.metrics()
        best = goal is not None and goal.better(metrics, at.best)
        at.validated_step, at.stale = at.step, 0 if best else at.stale + 1
        if best:
            at.best_step, at.best = at.step, metrics
        if metrics:
            self.account.validated(at.step, at.epoch + 1, metrics)
            self.tracking.log({f"validation_{name}": value for name, value in metrics.items()}, at.step)
            self.display.validated(at.step, metrics, best=best)
        if self.feed.exhausted or at.step_in_epoch >= self.steps_per_epoch:
            at.epoch, at.step_in_epoch = at.epoch + 1, 0
        for name in self.ranks.gathered(self.checkpoints.after_validation(metrics, best=best))[0]:
            self.save(name)
        self.settle()
        # Last, since whoever hears of it may end the run here: everything of this validation is kept by now.
        self.ranks.led(lambda: self.within.validated(at.step, at.epoch, metrics))

    def metrics(self) -> dict[str, float]:
        """Return the task's metrics, none where it has none."""
        if self.task.workload.metrics is None:
            return {}
        with self.judging():
            judged = self.task.judged()
        found = self.ranks.mean(judged)
        if self.task.goal is not None:
            self.task.goal.check(found, self.task.name)
        return found

    def interrupted(self) -> Outcome:
        """Save, and say how to go on."""
        self.save(checkpoint.LAST)
        self.check_saved()
        self.display.say(f"Interrupted at step {self.position.step} of {self.total}, and saved.")
        self.display.say(f"Resume with: {self.within.resume or configure.again(self.folder)}")
        return self.outcome("interrupted")

    def check_saved(self) -> None:
        """Check at the end that the last checkpoint is on disk; a trial's value is known, and worth no failure.

        Raises:
            TrainingFailedError: it is not.
        """
        if (error := self.checkpoints.missing) and self.within.trial is None:
            raise TrainingFailedError(f"the run is at step {self.position.step}, and no checkpoint has it: {error}")

    def save(self, name: str) -> None:
        """Write a checkpoint; each process has a place of its own in the data, and random numbers of its own."""
        models, keep = self.task.workload.models(), self.ranks.first
        own = self.ranks.gathered(
            {**self.feed.state_dict(), **sharding.own(models), "random": checkpoint.random_state()}
        )
        document = {
            "model": {name: sharding.state_of(model, keep=keep) for name, model in models.items()},
            "others": {name: sharding.state_of(one, keep=keep) for name, one in self.task.others().items()},
            "position": dataclasses.asdict(self.position),
            "data": self.task.fingerprint,
            **own[0],
            "of_ranks": own[1:],
            "settings": configure.to_dict(self.settings),
            "loop": self.compiling.state_dict(),
            "record": self.live.record.lengths(),
        }
        self.ranks.led(lambda: self.checkpoints.save(name, document))

    def restore(self, document: dict[str, Any]) -> None:
        """Go back to where a checkpoint was written.

        Raises:
            ConfigError: the program makes other models, optimizers or state than it did then.
        """
        self.task.load_models(document["model"])
        others, kept = self.task.others(), document["others"]
        if set(others) ^ set(kept) - _OF_PRECISION:
            raise ConfigError(
                f"the checkpoint holds {', '.join(kept)} beside the models; recipe={self.task.name} makes "
                f"{', '.join(others)} (another run.precision makes it keep others)"
            )
        for name in others.keys() & kept.keys():
            self.task.load_other(name, others[name], kept[name])
        self.position = Position(**document["position"])
        own = [document, *document["of_ranks"]][self.ranks.rank]
        sharding.load_own(self.task.workload.models(), own)
        self.feed.load_state_dict(own)
        self.compiling.resumed(self.position.step, document["loop"])
        checkpoint.restore_random_state(own["random"])

    def settle(self) -> None:
        """Bring the record's components and measurements up to date."""
        status, figures = self.compiling.status(), self.compiling.figures()
        if self.ready_seconds:
            figures["before_step_ms"] = 1000 * statistics.median(self.ready_seconds)
        memory = environment.peak_memory(self.task.device)
        self.account.settle(status, memory, figures)

    def outcome(self, status: str) -> Outcome:
        """Sum the run up."""
        at, seconds = self.position, time.monotonic() - self.began
        measured = dict(self.live.record.document["measurements"])
        components, notes = self.compiling.status(), tuple(self.compiling.summary())
        remarks = tuple(self.task.remarks(at.best, measured, components))
        return Outcome(
            status, self.folder, at.step, at.best_step, at.best, components, measured, seconds, notes, remarks
        )
