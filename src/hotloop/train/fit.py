"""The fit loop: steps, validations, checkpoints and the run's record, from its first step or from where it stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import shared_compiles
from hotloop.compiling.observe import watch
from hotloop.errors import RunPrunedError
from hotloop.measure import machine
from hotloop.record import RunRecord
from hotloop.step import Loop
from hotloop.train import checkpoint, configure, dry, environment, failures, opening
from hotloop.train.account import Account
from hotloop.train.automatic import Automatic
from hotloop.train.average import Average
from hotloop.train.batches import epoch_order, one_of_each, per_epoch, shapes
from hotloop.train.checkpoint import Position
from hotloop.train.compiling import Compiling, arguments
from hotloop.train.evaluate import evaluate, evaluating
from hotloop.train.interrupt import Interrupt
from hotloop.train.optimizing import advance, parameter_groups, schedule
from hotloop.train.outcome import Live, Outcome
from hotloop.train.rehearse import Plan, Rehearsal
from hotloop.train.saving import Checkpoints
from hotloop.train.tracking import Tracking
from hotloop.train.turn import hold_again
from hotloop.train.update import Update

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.events import Event
    from hotloop.train.batches import Batch
    from hotloop.train.display import Display
    from hotloop.train.settings import TrainingSettings
    from hotloop.train.start import Start
    from hotloop.train.task import Task

REHEARSED = 4
"""Batches on which CUDA graphs are tried before they are turned on."""


def fit(task: Task, start: Start, chosen: Plan, display: Display) -> Outcome:
    """Train a task.

    Args:
        task: what to train.
        start: the run's settings, its folder, and the checkpoint to go on from.
        chosen: what to compile, by `compiling.plan`.
        display: prints the run.

    Raises:
        TrainingFailedError: the run cannot go on (NaN, memory); the message says why and how to resume.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(start.open)
        if start.dry:
            return dry.recipe(task, start, chosen, display, _length(task, start.settings.training)[1])
        record = stack.enter_context(RunRecord(start.folder, hold_again))
        opening.write(start, task.told, record, display)
        record.update(
            "measurements", **{f"validation_{task.rows}": len(task.validation), "goal": str(task.goal), **task.context}
        )
        auto = start.settings.training.optimization.use_torch_compile == "auto"
        events = stack.enter_context(watch()) if chosen or auto else []
        if chosen or auto:
            stack.enter_context(shared_compiles(task.model))
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


def _length(task: Task, training: TrainingSettings) -> tuple[int, int]:
    """Return the optimizer steps of an epoch, and of the run."""
    accumulate = training.gradient_accumulation
    each = max(1, per_epoch(task.train, training.batch_size, accumulate) // accumulate)
    return each, min(each * training.num_epochs, training.max_steps or 2**62)


class _Fitting:
    """One run on its way: what it was given, what it made of that, and where it is."""

    def __init__(self, task: Task, start: Start, chosen: Plan, display: Display, live: Live) -> None:
        self.task, self.display, self.live = task, display, live
        self.settings, self.training, self.folder = start.settings, start.settings.training, start.folder
        self.within = start.within
        self.position, self.doing, self.began = Position(), "start", time.monotonic()
        self.device = device = environment.choose_device(self.settings.run.device)
        live.record.update("environment", **machine.describe(device))
        self.steps_per_epoch, self.total = _length(task, self.training)
        self.fabric, scaler = environment.fabric(device, self.training.optimization)
        self.tracking = Tracking(start, live.record, display.say)
        self.checkpoints = Checkpoints(start, display.say, live.interrupt)
        groups = parameter_groups(task.model, self.training.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.training.learning_rate)
        self.scheduler = self.make_scheduler(0)
        # The wrapper is for precision and device; checkpoints and compile deal with the task's own model.
        self.model, wrapped_optimizer = self.fabric.setup(task.model, self.optimizer)
        trained = [one for one in task.model.parameters() if one.requires_grad]
        self.average = Average(task.model, task.average) if task.average is not None else None
        self.one = Update(
            self.fabric,
            self.model,
            task.parts,
            optimizer=wrapped_optimizer,
            parameters=trained,
            max_norm=self.training.max_grad_norm,
            scaler=scaler,
            average=self.average,
        )
        self.seen = len(live.events)
        compiling = Compiling(
            chosen, self.settings, task.parts, display.say, steps=self.total, rehearsal=self.rehearsal
        )
        auto = self.training.optimization.use_torch_compile == "auto"
        self.automatic = self.make_automatic(compiling) if auto else None
        self.compiling = self.automatic or compiling
        batch = min(self.training.batch_size, len(task.train))
        if batch < self.training.batch_size:
            display.say(f"training.batch_size={self.training.batch_size}: batches are of the {batch} rows to train on")
        rows = batch * self.training.gradient_accumulation
        taken = {"samples": rows, **{what: rows * many for what, many in task.per_row.items()}}
        self.account = Account(live.record, taken)

    def run(self) -> Outcome:
        """Train to the end, or until somebody interrupts."""
        sizes = shapes(self.task.train, self.training.batch_size, self.training.gradient_accumulation)
        opening.announce(self.compiling, sizes, self.live.record, self.display)
        if self.average and (word := self.average.lagging(self.total)):
            self.display.say(word)
        self.display.begin(self.total, self.position.step)
        status = "failed"
        try:
            while not self.over():
                self.model.train()
                for batches in self.rest_of_epoch():
                    self.step(batches)
                    if self.live.interrupt.signal:
                        outcome = self.interrupted()
                        status = "interrupted"
                        return outcome
                    with self.account.aside():
                        due = self.position.step % (self.training.checkpoint_every_steps or self.total + 1) == 0
                        if due or self.checkpoints.is_due():
                            self.save(checkpoint.LAST)
                        self.show()
                with self.account.aside():
                    self.validate()
            self.show(last=True)
            self.checkpoints.check(self.save, self.position.step)
            status = "finished"
        except RunPrunedError:
            status = "pruned"
            raise
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        except Exception as error:
            failure = failures.explain(error)
            if failure is None:
                raise
            last = self.folder / checkpoint.FOLDER / checkpoint.LAST
            again = self.within.resume
            raise failures.with_checkpoint(failure, self.doing, self.folder, last, again) from error
        finally:
            self.settle()
            self.tracking.close(status)
        return self.outcome("finished")

    def make_automatic(self, between: Compiling) -> Automatic:
        """Hand the step to a hot loop, and what is asked for without gradients to ``between``.

        The loop counts the run's steps, those of earlier starts included.
        """
        task = self.task
        models = {name: task.parts[name] for name in task.compiled} or task.model
        ahead = one_of_each(self.task.train, self.training.batch_size, self.training.gradient_accumulation)
        rest = (task.model, self.average, self.one.scaler)
        loop = Loop(
            models,
            self.optimizer,
            state=[one for one in rest if one is not None and one is not models],
            run="auto",
            total_steps=self.total,
            runs=max(1.0, self.within.runs),
            batches=ahead or None,
            shapes=len(ahead) or None,
            record=self.live.record,
        )
        return Automatic(self.settings, task.parts, self.display.say, loop, self.one.optimizer_step, between=between)

    def rehearsal(self) -> Rehearsal:
        """Return what tries CUDA graphs on copies of the model before they are turned on."""
        size, seed = self.training.batch_size, self.settings.run.seed
        order = epoch_order(self.task.train, size, seed, self.position.epoch)[:REHEARSED]
        return Rehearsal(
            model=self.task.model,
            parts=self.task.parts,
            batches=[self.task.train.take(rows).to(self.device) for rows in order],
            optimizer=lambda model: torch.optim.AdamW(parameter_groups(model, self.training.weight_decay)),
            autocast=self.fabric.autocast,
            more=arguments(self.settings.compile),
            events=self.live.events,
        )

    def over(self) -> bool:
        """Say whether there is nothing left to do: all steps done and validated, or early stopping."""
        patience = self.training.early_stopping_patience
        stopped = patience is not None and self.position.stale >= patience
        return stopped or self.position.step == self.position.validated_step >= self.total

    def rest_of_epoch(self) -> Iterator[list[Batch]]:
        """Yield the batches of each step that is left of this epoch, up to the run's last step."""
        size, accumulate = self.training.batch_size, self.training.gradient_accumulation
        order = epoch_order(self.task.train, size, self.settings.run.seed, self.position.epoch, accumulate)
        for index in range(self.position.step_in_epoch, self.steps_per_epoch):
            if self.position.step >= self.total:
                return
            yield [self.task.train.take(rows) for rows in order[index * accumulate : (index + 1) * accumulate]]

    def step(self, batches: Sequence[Batch]) -> None:
        """Do one optimizer step and write it down."""
        self.doing = f"step {self.position.step + 1}"
        was_applied = self.compiling.applied
        self.compiling.before_step()
        if self.account_starts(was_applied):
            self.account.starts()
            self.display.running(self.compiling.running)
        rate = self.scheduler.get_last_lr()[0]
        began = time.perf_counter()
        loss, norm = self.update(batches)
        seconds = time.perf_counter() - began
        events = self.new_events()
        self.compiling.after_step(seconds, sum(batch.tokens for batch in batches), events)
        self.position.step += 1
        self.position.step_in_epoch += 1
        entry: dict[str, Any] = {
            "step": self.position.step, "seconds": seconds, "loss": loss, "learning_rate": rate,
            "gradient_norm": norm, "running": self.compiling.running,
        }  # fmt: skip
        self.account.step(entry, events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))
        self.display.step(entry)
        self.tracking.log({"loss": loss, "learning_rate": float(rate)}, self.position.step)

    def new_events(self) -> list[Event]:
        """Return what was observed since this was last asked."""
        events = self.live.events[self.seen :]
        self.seen += len(events)
        return events

    def account_starts(self, was_applied: bool) -> bool:
        """Say whether the coming step is the first that runs as asked: compiled, or eager where that was asked."""
        if self.compiling.chosen:
            return self.compiling.applied and not was_applied
        return self.account.idle

    def update(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Apply the batches' summed gradients; give the mean loss, and the gradients' norm before clipping."""
        moved = [batch.to(self.device) for batch in batches]
        rate = float(self.scheduler.get_last_lr()[0])
        # One wait for the device a step, here, since nothing in a step may wait for it. A loss that is NaN is seen
        # before it is written into the parameters. A captured step is one piece, so its loss is looked at behind it,
        # and the run ends here, before anything of these parameters is saved: the last checkpoint is sound.
        loss, norm = (self.automatic.step if self.automatic else self.one.gradients)(moved).tolist()
        if self.is_lost(loss, norm):
            self.one.drop()
            raise failures.not_finite(loss, norm, rate, applied=self.automatic is not None)
        if not self.automatic:
            self.one.apply()
        advance(self.scheduler, left_out=not math.isfinite(norm))
        return loss, norm

    def is_lost(self, loss: float, norm: float) -> bool:
        """Say whether a step's figures end the run; gradients that overflow in float16 end only their step."""
        return not math.isfinite(loss) or (not math.isfinite(norm) and not self.one.overflows())

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Run the model as validations do: in its own tier or presets, with the averages where there are some."""
        with self.average.in_place() if self.average else contextlib.nullcontext(), self.compiling.validating():
            yield
        events = self.new_events()
        self.compiling.after_validation(events)
        self.account.observed(self.position.step, self.compiling.unrecorded(events))

    def show(self, *, last: bool = False) -> None:
        """Let the task show the model as it stands, where it is time to; where the disk is full the run goes on."""
        step = self.position.step
        make = self.task.show.due(step, last=last) if self.task.show else None
        if make is None:
            return
        self.doing = f"what is shown after step {step}"
        try:
            with self.judging(), evaluating(self.model), checkpoint.random_state_kept():
                self.live.record.update("measurements", **make(step))
        except OSError as error:
            self.display.say(f"{error}; the run goes on without it")

    def validate(self) -> None:
        """Judge the model, keep it where it is the best so far, and go on to the next epoch where this one is done."""
        at = self.position
        self.doing = f"validation at step {at.step}"
        judge = self.task.judge(self.task.parts["loss"])
        with self.judging():
            metrics = evaluate(self.model, judge, self.task.validation, self.training.eval_batch_size, self.device)
        best = self.task.goal.better(metrics, at.best)
        at.validated_step, at.stale = at.step, 0 if best else at.stale + 1
        if best:
            at.best_step, at.best = at.step, metrics
        self.account.validated(at.step, at.epoch + 1, metrics)
        self.tracking.log({f"validation_{name}": value for name, value in metrics.items()}, at.step)
        self.display.validated(at.step, metrics, best=best)
        if at.step_in_epoch >= self.steps_per_epoch:
            at.epoch, at.step_in_epoch = at.epoch + 1, 0
        for name in (checkpoint.BEST, checkpoint.LAST) if best else (checkpoint.LAST,):
            self.save(name)
        self.settle()
        # Last, since whoever hears of it may end the run here: everything of this validation is kept by now.
        self.within.validated(at.step, at.epoch, metrics)

    def interrupted(self) -> Outcome:
        """Save, and say how to go on."""
        self.save(checkpoint.LAST)
        self.checkpoints.check(self.save, self.position.step)
        self.display.say(f"Interrupted at step {self.position.step} of {self.total}, and saved.")
        self.display.say(f"Resume with: {self.within.resume or configure.again(self.folder)}")
        return self.outcome("interrupted")

    def save(self, name: str) -> None:
        """Write a checkpoint."""
        document = {
            "model": self.task.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "position": dataclasses.asdict(self.position),
            "random": checkpoint.random_state(),
            "settings": configure.to_dict(self.settings),
            "data": self.task.fingerprint,
            "loop": self.compiling.state_dict(),
            "average": self.average.state_dict() if self.average else None,
            "scaler": self.one.scaler.state_dict() if self.one.scaler else None,
            "record": self.live.record.lengths(),
        }
        self.checkpoints.save(name, document)

    def restore(self, document: dict[str, Any]) -> None:
        """Go back to where a checkpoint was written; rate and decay are the settings', which may have changed since."""
        self.task.model.load_state_dict(document["model"])
        fresh = [group["weight_decay"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(document["optimizer"])
        for group, weight_decay in zip(self.optimizer.param_groups, fresh, strict=True):
            group["weight_decay"], group["initial_lr"] = weight_decay, self.training.learning_rate
        # Averages that were not kept before begin with the parameters, as they do in a new run.
        if self.average:
            self.average.load_state_dict({**document["model"], **(document.get("average") or {})})
        if self.one.scaler and document.get("scaler"):
            self.one.scaler.load_state_dict(document["scaler"])
        self.position = Position(**document["position"])
        self.scheduler = self.make_scheduler(self.position.step)
        self.compiling.resumed(self.position.step, document.get("loop"))
        checkpoint.restore_random_state(document["random"])

    def make_scheduler(self, step: int) -> torch.optim.lr_scheduler.LambdaLR:
        """Make the schedule as it stands after so many steps: it has no state of its own beyond their number."""
        factor = schedule(self.training, self.total)
        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor, last_epoch=step - 1)

    def settle(self) -> None:
        """Bring the record's components and measurements up to date."""
        memory = environment.peak_memory(self.device)
        status, figures = self.compiling.status(), self.compiling.figures()
        self.account.settle(status, memory, figures)
        self.tracking.compiled(status, figures, self.position.step)

    def outcome(self, status: str) -> Outcome:
        """Sum the run up."""
        at = self.position
        seconds = time.monotonic() - self.began
        measured = dict(self.live.record.document["measurements"])
        components = self.compiling.status()
        notes, remarks = tuple(self.compiling.summary()), tuple(self.task.remarks(at.best, measured)) if at.best else ()
        return Outcome(
            status, self.folder, at.step, at.best_step, at.best, components, measured, seconds, notes, remarks
        )
