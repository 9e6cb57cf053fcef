"""The callback of Lightning's Trainer."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from hotloop.compiling.control import Status, status
from hotloop.errors import ConfigError
from hotloop.integrations.in_place import InPlace
from hotloop.integrations.lightning.owned_step import OwnedStep
from hotloop.integrations.lightning.ownership import compiled_already, obstacles, optimizer_obstacles
from hotloop.integrations.lightning.shadows import Shadows, own_method
from hotloop.integrations.lightning.status import TrainerStatus
from hotloop.integrations.setting_names import check_names
from hotloop.integrations.several import level_of
from hotloop.record import RunRecord
from hotloop.step.tiers import Tier, tier_of_setting

if TYPE_CHECKING:
    from hotloop.presets import Preset
    from hotloop.step import Loop, LoopStatus

_SETTINGS = ("run", "layout", "sentinel", "record", "buckets", "workload", "total_steps", "runs")
"""Model, optimizer and their state are the Trainer's to name."""
_UNUSED = (
    "hand it over as Trainer(callbacks=[HotLoop()]), and call trainer.fit(module); where the strategy starts processes "
    "of its own (ddp_spawn, ddp_fork, ddp_notebook), the status is in these"
)
_READS_INDEX = (
    "training_step reads batch_idx, or a decorator or *args hides whether it does: the number differs in each step, "
    "which a captured step cannot follow and compiled code can; use it in on_train_batch_start or on_train_batch_end "
    "instead"
)
_log = logging.getLogger("hotloop")


class HotLoop(pl.Callback):
    """A callback that makes a Trainer's steps fast, and keeps them right.

    Where Lightning's hooks leave the training step to the module (automatic optimization on one device, no code of the
    program between forward, backward and optimizer), a `hotloop.Loop` owns it: it chooses the tier, proves it, captures
    whole steps, undoes what fails. So it does in several processes with ``"auto"`` or a tier that has a graph, under
    `DDPStrategy` and, where ``fully_shard`` has sharded the module, `ModelParallelStrategy`. Elsewhere the module is
    compiled in place, as far as it was asked for, and `status` says why it is not more. When the Trainer has ended, the
    module is as it was.

    Args:
        run: ``"auto"``, a tier, or a preset (a name or a `hotloop.Preset`), as for `hotloop.Loop`. Where no loop owns
            the step, nothing measures what a compile gains, so ``"auto"`` stays eager there.
        settings: further settings of `hotloop.Loop`: ``layout``, ``sentinel``, ``record``,
            ``buckets``, ``workload``, ``runs``, ``total_steps`` (the Trainer's own estimate, else). Where no loop owns
            the step, ``record`` is kept.

    Raises:
        ConfigError: a tier, preset or setting does not exist.
    """

    def __init__(self, run: str | Preset = "auto", **settings: Any) -> None:
        self._tier = tier_of_setting(run)
        check_names("HotLoop", settings, _SETTINGS)
        self.run, self._settings = (run if isinstance(run, str) else run.name), {"run": run, **settings}
        self._trainer: weakref.ref[pl.Trainer] | None = None
        self._fit: TrainerStatus | None = None
        self._evaluation: TrainerStatus | None = None
        """The last evaluation since that fit, or without a fit."""
        self._record: RunRecord | None = None
        self._in_place: InPlace | None = None
        self._owned: OwnedStep | None = None
        self._compiled: pl.LightningModule | None = None
        self._shadows: Shadows | None = None
        """Methods in front of those of a module that its user compiled."""
        self._batches = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and status, for a copy or a pickle; loop, record and Trainer are of this process."""
        here = dict.fromkeys(("_trainer", "_in_place", "_owned", "_compiled", "_shadows", "_record"))
        record = self._settings.get("record")
        named = {"record": record.folder} if isinstance(record, RunRecord) else {}
        stages = {"_fit": self._shown(self._fit), "_evaluation": self._shown(self._evaluation)}
        return {**vars(self), **here, **stages, "_settings": {**self._settings, **named}}

    # -- what people ask -------------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop | None:
        """The loop that owns the step of the current fit, if one does."""
        return self._owned.loop if self._owned is not None else None

    @property
    def record(self) -> RunRecord | None:
        """The run record of the current or last fit; without a fit, of an evaluation; None before."""
        return self._record

    def status(self) -> TrainerStatus:
        """Return what was asked for, what runs, or ran when the Trainer ended, and why it is not more."""
        after = self._shown(self._evaluation)
        if (fit := self._shown(self._fit)) is not None:
            return dataclasses.replace(fit, after=after)
        return after or TrainerStatus(asked=self.run, hints=[_UNUSED])

    @property
    def _current(self) -> TrainerStatus | None:
        """What the Trainer does now, or did last."""
        return self._evaluation or self._fit

    def _shown(self, stage: TrainerStatus | None) -> TrainerStatus | None:
        """Return the status of a call, with what runs now if it is the current one."""
        if stage is None or stage is not self._current or (self._owned is None and self._in_place is None):
            return stage
        return stage.now(*self._running())

    def _running(self) -> tuple[LoopStatus | None, Status | None]:
        """Return the status of the loop and of the compiled model."""
        if self._owned is not None:
            return self._owned.statuses()
        return None, status(self._compiled) if self._compiled is not None else None

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin a stage: the status describes it from now on.

        Raises:
            ConfigError: the Trainer has several of these callbacks.
        """
        self._end_stage()
        self._trainer = weakref.ref(trainer)
        begun = TrainerStatus(asked=self.run, stage=getattr(stage, "value", stage))
        if begun.stage == "fit":
            self._fit, self._evaluation, self._record = begun, None, None
        else:
            self._evaluation = begun
        ours = [callback for callback in vars(trainer)["callbacks"] if isinstance(callback, HotLoop)]
        if len(ours) > 1:
            runs = ", ".join(f"HotLoop(run={callback.run!r})" for callback in ours)
            raise ConfigError(
                f"Trainer(callbacks=[{runs}]): expected one HotLoop, since a training step has one owner: leave the "
                "others out; run= of the one that stays says what is wanted"
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide who owns the step, and compile the module in place where no loop will.

        By now the program has set everything up: its `setup` and `configure_model` have run, and the strategy has
        wrapped and sharded the module.
        """
        if self._fit is None:  # it was added to the callbacks when the fit had begun
            return
        self._note_user_compiles(pl_module, self._fit)
        if not self._fit.given:
            self._fit.why += obstacles(trainer, pl_module, self._tier)
        if self._fit.why:
            self._leave_step(pl_module, self._fit)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.validate``; in a fit it is compiled already, or a loop's."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._evaluate(pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.test``."""
        self._evaluate(pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.predict``."""
        self._evaluate(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the step to a loop, now that optimizer and checkpoint are there."""
        if self._fit is None or self._fit.why:
            return
        self._fit.why += optimizer_obstacles(trainer)
        if self._fit.why:
            self._leave_step(pl_module, self._fit)
            return
        done = trainer.global_step // max(1, len(trainer.optimizers))  # a resumed fit has done some of its steps
        left = trainer.estimated_stepping_batches - done
        settings = {"total_steps": int(left) if math.isfinite(left) and left > 0 else None, **self._settings}
        self._owned = owned = OwnedStep(trainer, pl_module, settings)
        self._record = owned.loop.record
        if owned.reads_index and owned.loop.context.engine is not None and (self._tier is None or self._tier.graph):
            self._fit.notes.append(_READS_INDEX)
        if self._tier == Tier("eager"):
            self._fit.notes.append(f"run={self.run!r} was asked for: steps run eager, and none is timed")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the batch of the coming step."""
        if self._owned is not None:
            self._owned.begin(batch, batch_idx)
        elif self._in_place is not None:
            self._in_place.step_begins()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the seconds of a step that the Trainer runs itself."""
        if self._in_place is not None:
            self._batches += 1
            self._in_place.step_ends(self._batches)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._end_stage()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the module as it was, whatever ended the fit; the exception goes its way."""
        if self._owned is not None:
            self._owned.loop.failed(exception)
        if self._current is not None:
            message = str(exception).strip().partition("\n")[0]
            self._current.ended = f"{type(exception).__name__}{f': {message}' if message else ''}"
        self._end_stage(exception)

    # -- how it is done --------------------------------------------------------------------------------------------

    def _compile_settings(self) -> dict[str, Any]:
        """Return the arguments for `hotloop.compile` that ``run=`` asks for; empty with auto, which must measure."""
        return self._tier.settings if self._tier is not None and self._tier.compiles else {}

    def _note_user_compiles(self, module: pl.LightningModule, stage: TrainerStatus) -> None:
        """Note what the user compiled, which stays as it is."""
        stage.given = compiled_already(module)
        if not stage.given:
            return
        reasons = stage.why if stage.stage == "fit" else stage.notes
        reasons.append(f"the module, or a part of it, is compiled already (by {stage.given}): taken as it is")
        stage.hints.append("hand fit() the plain module: HotLoop compiles its *_step methods, with self.log")
        if stage.given == "torch":
            # torch 2.13 cannot trace self.log: a graph break there keeps the user's own compile going.
            self._shadows = Shadows(module)
            for name in ("log", "log_dict"):
                untraced = torch.compiler.disable(own_method(module, name))  # type: ignore[no-untyped-call]
                self._shadows.put(name, untraced)

    def _leave_step(self, module: pl.LightningModule, fit: TrainerStatus) -> None:
        """Leave the step of a fit to the Trainer, say why, and compile the module in place as far as asked for."""
        level = level_of(logging.WARNING)
        for line in fit.why:
            _log.log(level, "HotLoop(run=%r): the training step is the Trainer's own: %s", self.run, line)
        kept = self._compile_in_place(module, fit, self._compile_settings(), self._settings.get("record"))
        for line in fit.why:
            kept.decided(f"the training step is the Trainer's own: {line}", logging.DEBUG)
        if self._tier is not None and (self._tier.graph or self._tier.channels_last):
            what = "captured" if self._tier.graph else "laid out"
            kept.decided(f"run={self.run!r}: no loop owns the step, so it is not {what}", logging.WARNING)

    def _evaluate(self, module: pl.LightningModule) -> None:
        """Compile the module in place for an evaluation, and note where it stays eager."""
        stage = self._evaluation
        if stage is None:  # it was added to the callbacks meanwhile
            return
        self._note_user_compiles(module, stage)
        settings = {} if stage.given else self._compile_settings()
        self._compile_in_place(module, stage, settings, None)
        if not settings and not stage.given:
            why = "measures training steps alone" if self._tier is None else "compiles nothing"
            stage.notes.append(f"trainer.{stage.stage} runs eager: run={self.run!r} {why}")

    def _compile_in_place(
        self, module: pl.LightningModule, stage: TrainerStatus, settings: dict[str, Any], folder: Any
    ) -> InPlace:
        """Compile with these settings, but nothing where the user compiled; keep a record, in the folder if any."""
        settings = {} if stage.given else settings
        kept = self._in_place = InPlace(module, self.run, settings, folder)
        if stage is self._fit or self._fit is None:
            self._record = kept.record
        self._batches = 0
        self._compiled = module if settings or stage.given == "hotloop" else None
        if self._tier is None and not settings and not stage.given:
            stage.hints.append('HotLoop(run="default") compiles in place, without measuring whether that pays')
        return kept

    def _end_stage(self, error: BaseException | None = None) -> None:
        """Take the loop or the compile off, and keep what the status says of it."""
        if self._shadows is not None:
            self._shadows.take_off()
            self._shadows = None
        stage = self._current
        if stage is None:
            return
        if self._owned is None and self._in_place is None:
            if stage is self._fit and not stage.notes and stage.model is None and stage.loop is None:
                stage.notes.append("no training step came to it")
            return
        ended = self._shown(stage)
        assert ended is not None
        if stage is self._fit:
            self._fit = ended
        else:
            self._evaluation = ended
        owned, kept, self._owned, self._in_place, self._compiled = self._owned, self._in_place, None, None, None
        if owned is not None:
            loop = ended.loop
            if self._tier is None and loop is not None and not loop.decisions:
                ended.notes.append(f"run='auto' had decided nothing yet when the fit ended at step {loop.step}")
            owned.close()
        if kept is not None:
            kept.close(error)
