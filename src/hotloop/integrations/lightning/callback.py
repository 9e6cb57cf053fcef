"""The callback of Lightning's Trainer."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from hotloop.compiling.control import paused, status
from hotloop.errors import ConfigError
from hotloop.integrations.in_place import InPlace
from hotloop.integrations.lightning.allowed import why_not, why_not_with
from hotloop.integrations.lightning.given import compiled_by_user
from hotloop.integrations.lightning.owned import OwnedStep
from hotloop.integrations.lightning.shadow import Shadows, own_method
from hotloop.integrations.lightning.status import Stage, TrainerStatus, hints_of
from hotloop.integrations.named import check_names
from hotloop.step.tiers import Tier, parse

if TYPE_CHECKING:
    from hotloop.integrations.lightning.status import Seen
    from hotloop.record import RunRecord
    from hotloop.step import Loop

_log = logging.getLogger("hotloop")
_SETTINGS = ("sentinel", "record", "buckets", "workload", "total_steps", "runs")
"""Settings of a loop that a Trainer's can have; model, optimizer and their state are the Trainer's to name."""
_CHOOSE = 'HotLoop(run="default") compiles in place, without measuring whether that pays'
_BEGIN = (
    "hand it over as Trainer(callbacks=[HotLoop()]), and call trainer.fit(module); where the strategy starts processes "
    "of its own (ddp_spawn, ddp_fork, ddp_notebook), the status is in these"
)
_NO_STEP = "no training step came to it"
_BY_NUMBER = (
    "training_step reads batch_idx, or a decorator or *args hides whether it does: it is another number in each step, "
    "which a captured step cannot follow and compiled code can; leave it to on_train_batch_start or on_train_batch_end"
)
_STATISTICS = (
    "the last pass over the data, in which weight averaging has BatchNorm compute its statistics anew, runs eager: it "
    "counts batches in Python, so that each would be compiled anew"
)
_NEVER: Seen = (None, None, None)


class HotLoop(pl.Callback):
    """Makes a Trainer's steps fast, and keeps them right.

    Where Lightning's hooks leave the training step to the module (automatic optimization on one device, nothing of the
    program's own between forward, backward and optimizer), a `hotloop.Loop` owns it: it chooses the tier, proves it,
    captures whole steps, undoes what fails. Elsewhere the module is compiled in place, as far as it was asked for, and
    `status` says why it is not more. When the Trainer has ended, the module is as it was.

    Args:
        run: ``"auto"``, a tier, or a preset, as for `hotloop.Loop`. Where no loop owns the step, nothing measures what
            a compile gains, so ``"auto"`` stays eager there.
        settings: further settings of `hotloop.Loop`: ``sentinel``, ``record``, ``buckets``, ``workload``, ``runs``,
            ``total_steps`` (by default the Trainer's own estimate). Where no loop owns the step, ``record`` is kept.

    Raises:
        ConfigError: there is no such tier, preset or setting.
    """

    def __init__(self, run: str = "auto", **settings: Any) -> None:
        if not isinstance(run, str):
            raise ConfigError(f"HotLoop(run={run!r}): expected 'auto', a tier or a preset, by name")
        if run.strip().lower() != "auto":
            parse(run)
        check_names("HotLoop", settings, ("run", *_SETTINGS))
        self.run, self._settings = run, settings
        self._trainer: weakref.ref[pl.Trainer] | None = None
        self._fit: Stage | None = None
        self._after: Stage | None = None
        """The last evaluation since that fit, or without one."""
        self._in_place: InPlace | None = None
        self._owned: OwnedStep | None = None
        self._compiled: pl.LightningModule | None = None
        self._batches = 0
        self._logging: Shadows | None = None
        self._eager = contextlib.ExitStack()
        """Open while a pass over the data runs eager."""
        self._no_grad: tuple[Any, bool] | None = None
        """The Trainer's loop that runs an evaluation, and its own setting."""
        self._left: tuple[weakref.ref[pl.LightningModule], dict[str, Any], bool] | None = None
        """A module whose step a loop has owned, what it was compiled with, and whether its validation was as well."""

    # -- what people ask -------------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop | None:
        """The loop that owns the step of the fit that is going on, where one does."""
        return self._owned.loop if self._owned is not None else None

    def status(self) -> TrainerStatus:
        """Say what was asked for, what runs, or ran when the Trainer ended, and why it is not more."""
        if self._fit is None and self._after is None:
            return TrainerStatus(asked=self.run, owned=False, hints=(_BEGIN,))
        after = self._told(self._after) if self._after is not None else None
        return after if self._fit is None and after is not None else self._told(self._fit, after)

    def _told(self, stage: Stage | None, after: TrainerStatus | None = None) -> TrainerStatus:
        assert stage is not None
        loop, model, _ = self._now(stage)
        return TrainerStatus(
            asked=self.run,
            owned=loop is not None,
            stage=stage.name,
            given=bool(stage.given),
            why=tuple(stage.why),
            notes=(*stage.notes, *(self._left_alone() if stage is self._current else ())),
            hints=(*stage.hints, *hints_of(loop)),
            ended=stage.ended,
            loop=loop,
            model=model,
            after=after,
        )

    @property
    def record(self) -> RunRecord | None:
        """The run record of the fit that goes on, or went last; without one that of an evaluation; None before."""
        stage = self._fit or self._after
        return self._now(stage)[2] if stage is not None else None

    @property
    def _current(self) -> Stage | None:
        """What the Trainer does now, or did last."""
        return self._after or self._fit

    def _now(self, stage: Stage) -> Seen:
        if stage is not self._current:
            return stage.seen
        if self._owned is not None:
            return self._owned.seen()
        if self._in_place is None:
            return stage.seen
        return None, status(self._compiled) if self._compiled is not None else None, self._in_place.record

    def _left_alone(self) -> list[str]:
        """Say that the callback was taken out of the Trainer's in the fit: nobody tells it that the fit has ended."""
        trainer = self._trainer() if self._trainer is not None else None
        if self._owned is not None and self._owned.left_at is not None:
            step = self._owned.left_at
            return [f"taken out of trainer.callbacks at step {step:,}: from there on the step is the Trainer's own"]
        if self._in_place is None or trainer is None or self in vars(trainer)["callbacks"]:
            return []
        stays = "; the module stays compiled until hotloop.uncompile(module)" if self._compiled is not None else ""
        return [f"taken out of trainer.callbacks{stays}"]

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Begin to note what the Trainer does now.

        Raises:
            ConfigError: the Trainer has several of these callbacks.
        """
        self._take_off()
        self._trainer = weakref.ref(trainer)
        made = Stage(getattr(stage, "value", stage))
        if made.name == "fit":
            self._fit, self._after, self._left = made, None, None
        else:
            self._after = made
        ours = [one for one in vars(trainer)["callbacks"] if isinstance(one, HotLoop)]
        if len(ours) > 1:
            asked = ", ".join(f"HotLoop(run={one.run!r})" for one in ours)
            raise ConfigError(
                f"Trainer(callbacks=[{asked}]): expected one HotLoop, since a training step has one owner: leave the "
                "others out; run= of the one that stays says what is wanted"
            )
        if made.name != "fit" and self._evaluates_with(pl_module) and not compiled_by_user(pl_module):
            self._without_inference_mode(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Decide who owns the step, and compile the module in place where no loop will.

        All that the program sets up is there: its `setup` and `configure_model` have run, and the strategy has wrapped
        and sharded the module.
        """
        assert self._fit is not None
        self._take_as_given(pl_module, self._fit)
        if not self._fit.given:
            self._fit.why += why_not(trainer, pl_module)
        self._say()
        if self._fit.why:
            self._compile_in_place(pl_module, self._asked(), folder=self._settings.get("record"))

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
        if self._fit is None:  # it was added to the callbacks when the fit had begun
            self.setup(trainer, pl_module, "fit")
            self.on_fit_start(trainer, pl_module)
        assert self._fit is not None
        if self._fit.why:
            return
        self._fit.why += why_not_with(trainer.optimizers)
        if self._fit.why:
            self._say()
            self._compile_in_place(pl_module, self._asked(), folder=self._settings.get("record"))
            return
        done = trainer.global_step // max(1, len(trainer.optimizers))  # before a run that goes on
        left = trainer.estimated_stepping_batches - done
        settings = {"total_steps": int(left) if math.isfinite(left) and left > 0 else None, **self._settings}
        self._owned = OwnedStep(trainer, pl_module, {"run": self.run, **settings})
        asked = None if self._auto else parse(self.run)
        if self._owned.reads_index and self._owned.loop.context.engine is not None and (asked is None or asked.graph):
            self._fit.notes.append(_BY_NUMBER)
        if asked == Tier("eager"):
            self._fit.notes.append(f"run={self.run!r} was asked for: steps run eager, and none is timed")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch that the coming step is a function of."""
        if batch_idx == 0:
            self._stand_back(trainer, pl_module)
        if self._owned is not None:
            self._owned.begin(batch, batch_idx)
        elif self._in_place is not None:
            self._in_place.step_begins()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write down what a step of the Trainer's own took."""
        if self._in_place is not None:
            self._batches += 1
            self._in_place.step_ends(self._batches)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Go on after a pass that ran eager."""
        self._eager.close()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._take_off()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the module as it was, whatever ended the fit; the exception goes its way."""
        if self._owned is not None:
            self._owned.loop.failed(exception)
        if self._current is not None:
            said = str(exception).strip().partition("\n")[0]
            self._current.ended = f"{type(exception).__name__}{f': {said}' if said else ''}"
        self._take_off(exception)

    # -- how -------------------------------------------------------------------------------------------------------

    @property
    def _auto(self) -> bool:
        return self.run.strip().lower() == "auto"

    def _asked(self) -> dict[str, Any]:
        """Give the arguments for `hotloop.compile` of what was asked for; with auto nothing, as nobody measures it."""
        tier = Tier("eager") if self._auto else parse(self.run)
        return tier.settings if tier.compiles else {}

    def _evaluates_with(self, module: pl.LightningModule) -> dict[str, Any]:
        """Give the same for an evaluation: after a fit what its loop has compiled, so that none is compiled again."""
        assert self._after is not None
        if self._left is None or self._left[0]() is not module:
            return self._asked()
        _, settings, validated = self._left
        return settings if not self._auto or (validated and self._after.name == "validate") else {}

    def _evaluate(self, module: pl.LightningModule) -> None:
        """Compile the module in place for an evaluation, and say where it stays eager."""
        assert self._after is not None
        stage = self._after
        self._take_as_given(module, stage)
        settings = {} if stage.given else self._evaluates_with(module)
        self._compile_in_place(module, settings)
        if settings or stage.given:
            return
        if self._auto:
            of_fit = "" if self._left is None else ", and the fit before it compiled none of it"
            stage.notes.append(f"trainer.{stage.name} runs eager: run='auto' measures training steps alone{of_fit}")
        elif self._asked():
            stage.notes.append(f"trainer.{stage.name} runs eager, as the steps of the fit before it did when it ended")
        else:
            stage.notes.append(f"trainer.{stage.name} runs eager: run={self.run!r} compiles nothing")

    def _without_inference_mode(self, trainer: pl.Trainer) -> None:
        """Have an evaluation run under ``no_grad``, as validation in a fit does: torch compiles each of the two."""
        assert self._after is not None
        loop = getattr(trainer, f"{self._after.name}_loop")
        self._no_grad = loop, loop.inference_mode
        loop.inference_mode = False

    def _take_as_given(self, module: pl.LightningModule, stage: Stage) -> None:
        """Note what the user compiled himself, and leave it as it is."""
        found = compiled_by_user(module)
        stage.given = "torch" if any(one.by_torch for one in found) else "hotloop" if found else ""
        taken = stage.why if stage.name == "fit" else stage.notes
        taken += [f"{one.what}: taken as it is" for one in found]
        stage.hints += [one.hint for one in found]
        if stage.given == "torch":
            self._keep_logging_out(module)

    def _compile_in_place(self, module: pl.LightningModule, settings: dict[str, Any], folder: Any = None) -> None:
        """Compile what was asked for; nothing where the user did. A fit's record goes to its folder."""
        stage = self._current
        assert stage is not None
        settings = {} if stage.given else settings
        self._in_place, self._batches = InPlace(module, self.run, settings, folder), 0
        self._compiled = module if settings or stage.given == "hotloop" else None
        for line in stage.why:
            self._in_place.decided(f"the training step is the Trainer's own: {line}", logging.DEBUG)
        if self._auto:
            if not settings and not stage.given:
                stage.hints.append(_CHOOSE)
        elif parse(self.run).graph and stage.name == "fit":
            self._in_place.decided(f"run={self.run!r}: no loop owns the step, so it is not captured", logging.WARNING)

    def _keep_logging_out(self, module: pl.LightningModule) -> None:
        """Have the user's own compile break its graph at self.log, which it cannot trace on torch 2.13."""
        self._logging = Shadows(module)
        for name in ("log", "log_dict"):
            outside = torch.compiler.disable(own_method(module, name))  # type: ignore[no-untyped-call]
            self._logging.put(name, outside)

    def _stand_back(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Have an epoch that is a forward for BatchNorm's statistics and nothing else run eager."""
        compiled = self._compiled is not None or (self._owned is not None and bool(self._owned.compiled_with()))
        if getattr(trainer.fit_loop, "_skip_backward", False) and compiled and self._fit is not None:
            self._eager.enter_context(paused([module]))
            self._fit.notes.append(_STATISTICS)

    def _say(self) -> None:
        for line in self._fit.why if self._fit is not None else ():
            _log.warning("HotLoop(run=%r): the training step is the Trainer's own: %s", self.run, line)

    def _take_off(self, error: BaseException | None = None) -> None:
        self._eager.close()
        if self._logging is not None:
            self._logging.take_off()
            self._logging = None
        if self._no_grad is not None:
            loop, self._no_grad = self._no_grad, None
            loop[0].inference_mode = loop[1]
        stage = self._current
        if stage is None:
            return
        if self._owned is None and self._in_place is None:
            if stage is self._fit and not stage.notes and stage.seen == _NEVER:
                stage.notes.append(_NO_STEP)
            return
        stage.notes += self._left_alone()
        stage.seen = self._now(stage)
        owned, kept, self._owned, self._in_place, self._compiled = self._owned, self._in_place, None, None, None
        if owned is not None:
            if self._auto and stage.seen[0] is not None and not stage.seen[0].decisions:
                stage.notes.append(
                    f"run='auto' had decided nothing yet when the fit ended at step {stage.seen[0].step}"
                )
            self._remember(owned)
            owned.close()
        if kept is not None:
            kept.close(error)

    def _remember(self, owned: OwnedStep) -> None:
        """Note what a fit leaves for an evaluation after it: code that is compiled already."""
        _, model, _ = owned.seen()
        parts = model.components.values() if model is not None else ()
        validated = any(one.modes.get("inference", {}).get("frames_compiled") for one in parts)
        self._left = weakref.ref(owned.module), owned.compiled_with(), validated
