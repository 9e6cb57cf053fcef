"""A LightningModule fitted by Lightning's Trainer, as a run: its record, checkpoints, validations and how it ends."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.io import CheckpointIO

from hotloop.errors import TrainingFailedError
from hotloop.measure import machine
from hotloop.record import RunRecord
from hotloop.train import checkpoint, closing, compiling, configure, environment, failures, opening, sharding
from hotloop.train.account import Account
from hotloop.train.checkpoint import Position, random_state
from hotloop.train.interrupt import Interrupt
from hotloop.train.lightning_compile import Compiled
from hotloop.train.lightning_trainer import (
    SHARED_OUT,
    check_rates,
    completed,
    following,
    is_no_restart,
    make_trainer,
    numbers,
    quiet,
)
from hotloop.train.outcome import Outcome
from hotloop.train.ranks import check_shares
from hotloop.train.requests import SAVE, Requests
from hotloop.train.resumable import Place
from hotloop.train.saving import Checkpoints
from hotloop.train.start import write_settings
from hotloop.train.task import check_plain, rate_of
from hotloop.train.tracking import Tracking
from hotloop.train.turn import hold_again

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hotloop.train.display import Display
    from hotloop.train.fold import Fold
    from hotloop.train.goal import Goal
    from hotloop.train.ranks import Ranks
    from hotloop.train.start import Start
    from hotloop.train.task import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """What is fitted.

    Args:
        name: of the program.
        module, data: the LightningModule and the LightningDataModule.
        device: where.
        goal: which validation is the best.
        fold: what the run holds out.
        told: what is said of it, for the record: lines by subject.
        ranks: the processes that fit it together.
    """

    name: str
    module: Any
    data: Any
    device: torch.device
    goal: Goal | None
    fold: Fold | None
    told: Mapping[str, Sequence[str]]
    ranks: Ranks


def fit(given: Given, start: Start, chosen: Plan, display: Display) -> Outcome:
    """Fit a module to its end or until somebody interrupts; its report is written however it ends.

    Raises:
        ConfigError: the module cannot be kept in a checkpoint, or another process trains in the folder.
        TrainingFailedError: the run cannot go on (NaN, memory); the message says why and how to resume.
    """
    for one, what in ((given.module, "module"), (given.data, "data")):
        check_plain(
            given.name, f"{what}'s hparams (leave them out by save_hyperparameters(ignore=...))", dict(one.hparams)
        )
    write_settings(start)
    display.say(f"Run: {start.folder}" + (", resumed" if start.resume else ""))
    with closing.reported(start, display):
        outcome = _fit(given, start, chosen, display)
        closing.tell(outcome, display)
    return outcome


def _fit(given: Given, start: Start, chosen: Plan, display: Display) -> Outcome:
    with contextlib.ExitStack() as stack:
        stack.enter_context(start.open)
        record = stack.enter_context(RunRecord(start.folder if start.leads else None, hold_again))
        opening.write(start, given.told, record, display)
        record.update("measurements", **({"goal": str(given.goal)} if given.goal else {}))
        record.update("environment", **machine.describe(given.device))
        stack.enter_context(quiet())
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(display)
        compiled = Compiled(start.settings, chosen, start.within.runs, record)
        recorder = _Recorder(given, start, compiled, display, record, interrupt)
        stack.callback(recorder.requests.close)
        outcome = recorder.run()
        if outcome.status == "interrupted":
            record.finish("interrupted", f"{interrupt.signal} at step {outcome.step}")
    return dataclasses.replace(outcome, stop=interrupt.signal is not None)


class _StoppedError(Exception):
    """Somebody interrupted; all is saved."""


class _Kept(CheckpointIO):
    """Writes the Trainer's checkpoints as the run's: both programs read the file."""

    def __init__(self, recorder: _Recorder) -> None:
        self._recorder = recorder

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Take a checkpoint of the Trainer's, of the run or of a callback; the first process alone is asked."""
        self._recorder.take(str(path), checkpoint)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint: that which the run goes on from was read already."""
        given = self._recorder.start.resume if Path(path) == self._recorder.resumed else None
        return dict(given or checkpoint.load(Path(path)))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file that a callback of the module's own has written; the Trainer deletes none of the run's."""
        Path(path).unlink(missing_ok=True)


class _Recorder(pl.callbacks.Checkpoint):
    """Writes a fit down as it happens. It is a Checkpoint so that the Trainer calls it last."""

    def __init__(  # noqa: PLR0913, PLR0917 - a run, what fits it, and what is open while it goes on
        self, given: Given, start: Start, compiled: Compiled, display: Display, record: RunRecord, interrupt: Interrupt
    ) -> None:
        self.given, self.ranks, self.start, self.compiled, self.display = given, given.ranks, start, compiled, display
        self.own: list[dict[str, Any]] = [{"epoch_began": None, "random": random_state()}]
        self.record, self.interrupt, self.training = record, interrupt, start.settings.training
        self.position, self.began, self.doing = Position(), time.monotonic(), "start"
        self.place, self.fingerprint = Place(), ""
        self.account = Account(record, {})
        self.tracking = Tracking(start, record, display.say, interrupt)
        self.checkpoints = Checkpoints(start, display.say, interrupt)
        self.requests = Requests(start.folder if start.leads else None, (SAVE,))
        self.total, self.metrics = 0, dict[str, float]()
        self.loss, self.seconds, self.batch_began = 0.0, 0.0, 0.0
        self.ended_epoch: dict[str, Any] | None = None
        """The Trainer's own progress at the end of an epoch that is still to be kept."""
        self.validated_at = -1
        self.last = start.folder / checkpoint.FOLDER / checkpoint.LAST
        self.resumed, self.taken = start.resumed, dict[str, Any]()

    def run(self) -> Outcome:
        """Fit to the end, or until somebody interrupts."""
        given, data = self.given, self.given.data
        asked = self.compiled.asked
        self.display.say(f"{compiling.PREFIX} HotLoop(run={asked!r})" if asked else compiling.DISABLED)
        if self.start.resume:
            self.go_on(self.start.resume)
        data.train_dataloader = following(data.train_dataloader, self.place)
        callbacks = [one for one in (self.compiled.callback, self) if one is not None]
        own = {"callbacks": callbacks, "plugins": [_Kept(self)], "default_root_dir": self.start.folder}
        fitter = make_trainer(self.start.settings, given.device, several=self.ranks.size, **own)
        status = "failed"
        try:
            fitter.fit(given.module, datamodule=data, ckpt_path=self.resumed)
            (lacks,) = self.ranks.any(self.checkpoints.lacks_last)  # all take part in a checkpoint
            if lacks:
                self.save(fitter, checkpoint.LAST)
            self.checkpoints.check(self.position.step)
            status = "finished"
        except _StoppedError:
            status = "interrupted"
            self.display.say(f"Interrupted at step {self.position.step} of {self.total}, and saved.")
            self.display.say(f"Resume with: {self.start.within.resume or configure.again(self.start.folder)}")
        except SystemExit as error:  # as the Trainer answers a second Ctrl-C
            status = "interrupted"
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise
        except Exception as error:
            less = "a smaller batch_size of the data, or run.precision=bf16-mixed"
            failure = self.ranks.explain(error) or failures.explain(error, less)
            if failure is None:
                raise
            folder, again = self.start.folder, self.start.within.resume
            raise failures.with_checkpoint(failure, self.doing, folder, self.last, again) from error
        finally:
            self.settle()
            self.tracking.close(status)
        return self.outcome(status)

    def go_on(self, document: dict[str, Any]) -> None:
        """Go back to where a checkpoint was written; the Trainer puts back what it knows itself."""
        self.position = Position(**document["position"])
        self.own = [document, *document.get("of_ranks", ())]
        own = checkpoint.of_rank(document, self.ranks.rank)
        self.place = Place(
            own["epoch_began"],
            self.position.step_in_epoch,
            own["random"],
            self.position.epoch,
            own.get("generators", ()),  # those that the loader draws its order from, if it has some
        )

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Check that the data are those of the checkpoint, and draw random numbers as it would have.

        The Trainer reads its batches behind this hook, and has set the data up before it.
        """
        self.fingerprint = self.given.fold.fingerprint() if self.given.fold else ""
        self.start.check_data(self.fingerprint)
        if self.start.resume:
            checkpoint.restore_random_state(self.own[self.ranks.rank]["random"])
        elif not self.ranks.first:  # the weights are the same; what is drawn in steps differs
            environment.seed(self.start.settings.run.seed + self.ranks.rank)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Say how long the run is, and hear signals again: the Trainer has put handlers of its own in front."""
        self.interrupt.hear_again()
        for optimizer in trainer.optimizers if self.start.settings.run.strategy == "fsdp2" else ():
            sharding.check_steps(optimizer)
        if self.start.resume:
            with checkpoint.part("buffers"):
                sharding.load_own({"model": pl_module}, self.own[self.ranks.rank])
        if not self.position.step_in_epoch:
            is_no_restart(trainer)  # else, with max_steps, the Trainer ends the epoch before this one again
        estimated = trainer.estimated_stepping_batches
        self.total = int(estimated) if math.isfinite(estimated) else self.position.step
        self.display.begin(self.total, self.position.step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep the epoch before this one."""
        self.keep_epoch(trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note when a batch begins."""
        self.doing = f"step {trainer.global_step + 1}"
        if not trainer.global_step:
            check_shares(self.ranks, batch, SHARED_OUT)
        if self.account.idle:
            self.account.starts()
        self.batch_began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Write a step down, and save within an epoch where it is time to."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.loss += math.nan if loss is None else float(loss)
        self.seconds += time.perf_counter() - self.batch_began
        self.position.step_in_epoch = batch_idx + 1
        if trainer.global_step == self.position.step:  # gradients are accumulated
            return
        self.position.step = trainer.global_step
        self.step(trainer, has_loss=loss is not None)
        if trainer.is_last_batch or self.position.step >= self.total or not self.place.known:
            return  # the end of the epoch is kept, with its validation
        due = self.checkpoints.is_due(self.position.step) or self.requests.asked(SAVE)
        stops, saves = self.ranks.any(self.interrupt.signal is not None, due)
        if stops or saves:
            with self.account.aside():
                self.save(trainer, checkpoint.LAST)
            self.requests.answered(SAVE, self.position.step, self.checkpoints.problem)
        if stops:
            raise _StoppedError

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Note that there was a validation."""
        self.validated_at = trainer.global_step

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Judge the epoch; it is kept once the Trainer has done all that belongs to it."""
        is_no_restart(trainer)  # else schedules that go by a metric leave out the epoch in which a run was resumed
        validates = bool(trainer.num_val_batches) and sum(trainer.num_val_batches) > 0
        self.ended_epoch = completed(trainer.fit_loop.state_dict())
        self.position.epoch, self.position.step_in_epoch = trainer.current_epoch + 1, 0
        fresh = not validates or self.validated_at == trainer.global_step
        self.metrics = self.ranks.mean(numbers(trainer.callback_metrics)) if fresh else {}
        if self.judge():
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Keep the last epoch."""
        self.keep_epoch(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Gather what each process alone knows: the Trainer calls this in all of them, and then writes in the first."""
        place = {"epoch_began": self.place.began, "generators": self.place.generators()}
        self.own = self.ranks.gathered({**place, "random": random_state(), **sharding.own({"model": pl_module})})

    # -- what is made of it ----------------------------------------------------------------------------------------

    def step(self, trainer: pl.Trainer, *, has_loss: bool) -> None:
        """Write a step down.

        Raises:
            TrainingFailedError: its loss is not finite.
        """
        step, loss, seconds, self.loss, self.seconds = self.position.step, self.loss, self.seconds, 0.0, 0.0
        loss = self.ranks.mean({"loss": loss})["loss"]
        found = rate_of(trainer.optimizers) | ({"loss": loss} if has_loss else {})
        entry = {"step": step, "seconds": seconds, **found, "running": self.compiled.running()}
        self.account.step(entry, ())
        self.compiled.copy()
        self.display.step(entry)
        self.tracking.step(found, step)
        if has_loss and not math.isfinite(loss):
            raise TrainingFailedError(
                f"the loss is {loss}; the step was applied, so the parameters are lost, and no checkpoint holds them. "
                "Try a lower learning rate of the module, or training.max_grad_norm=1.0"
            )

    def judge(self) -> bool:
        """Judge the metrics of an epoch, and return whether the run is to stop early.

        Raises:
            ConfigError: that of ``recipe.goal`` is not among them.
        """
        at, goal, metrics = self.position, self.given.goal, self.metrics
        if goal is not None and metrics:
            goal.check(metrics, self.given.name, None if self.start.within.resume else self.start.folder)
        best = goal is not None and goal.better(metrics, at.best)
        at.validated_step, at.stale = at.step, 0 if best else at.stale + 1
        if best:
            at.best_step, at.best = at.step, metrics
        if metrics:
            self.account.validated(at.step, at.epoch, metrics)
            self.tracking.log({f"validation_{name}": value for name, value in metrics.items()}, at.step)
            self.display.validated(at.step, metrics, best=best)
        patience = self.training.early_stopping_patience
        return goal is not None and patience is not None and at.stale >= patience

    def keep_epoch(self, trainer: pl.Trainer) -> None:
        """Write the checkpoints of an epoch that has ended, and tell whoever hears of its validation.

        Not in `on_train_epoch_end`: schedules that go by a metric step after it. But with the Trainer's progress as it
        was there, since from a later one it would leave the next epoch out.

        Raises:
            RunPrunedError: the run is not worth going on with.
        """
        if self.ended_epoch is None:
            return
        at = self.position
        check_rates(self.ranks, trainer)
        with self.account.aside():
            best = bool(at.best) and at.best_step == at.step
            for name in self.ranks.gathered(self.checkpoints.after_validation(self.metrics, best=best))[0]:
                self.save(trainer, name)
            self.settle()
        self.ended_epoch = None
        self.ranks.led(lambda: self.start.within.validated(at.step, at.epoch, self.metrics))
        (stops,) = self.ranks.any(self.interrupt.signal is not None)
        if stops:
            raise _StoppedError

    def save(self, trainer: pl.Trainer, name: str) -> None:
        """Write a checkpoint of the run. All processes take part, and wait while the first one waits for the disk."""
        trainer.save_checkpoint(name)
        self.ranks.led(lambda: self.checkpoints.save(name, self.taken))
        self.taken = {}

    def take(self, name: str, document: dict[str, Any]) -> None:
        """Take a checkpoint: the Trainer's document, and what the run keeps beside it. A callback's is written."""
        if self.ended_epoch is not None:
            document["loops"]["fit_loop"] = self.ended_epoch
        ours = {
            "model": {"model": document["state_dict"]},
            "others": {},
            "position": dataclasses.asdict(self.position),
            "data": self.fingerprint,
            **self.own[0],
            "of_ranks": self.own[1:],
            "settings": configure.to_dict(self.start.settings),
            "record": self.record.lengths(),
        }
        if name in (checkpoint.BEST, checkpoint.LAST):
            self.taken = {**document, **ours}
        else:
            self.checkpoints.save(name, {**document, **ours})

    def settle(self) -> None:
        """Bring the record's components and measurements up to date."""
        self.compiled.copy()
        components, figures = self.compiled.components(), self.compiled.figures()
        memory = environment.peak_memory(self.given.device)
        self.account.settle(components, memory, {**figures, **self.tracking.cost()})
        self.tracking.compiled(components, figures, self.position.step)

    def outcome(self, status: str) -> Outcome:
        """Sum the run up."""
        at, seconds = self.position, time.monotonic() - self.began
        measured, ran = dict(self.record.document["measurements"]), self.compiled.components()
        folder, notes = self.start.folder, self.compiled.notes()
        return Outcome(status, folder, at.step, at.best_step, at.best, ran, measured, seconds, notes)
