"""The callback of Lightning's Trainer."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from hotloop.control import status
from hotloop.errors import ConfigError
from hotloop.integrations.in_place import InPlace
from hotloop.integrations.lightning.allowed import compiled_by_user, why_not, why_not_with
from hotloop.integrations.lightning.owned import OwnedStep
from hotloop.integrations.lightning.shadow import Shadows, own_method
from hotloop.integrations.lightning.status import TrainerStatus
from hotloop.step.tiers import Tier, parse

if TYPE_CHECKING:
    from hotloop.control import Status
    from hotloop.record import RunRecord
    from hotloop.step import Loop, LoopStatus

_log = logging.getLogger("hotloop")
_AS_GIVEN = "hand fit() the module itself: names, checkpoints and self.log stay as in eager, and a failure falls back"
_SETTINGS = ("sentinel", "record", "buckets", "workload", "total_steps", "runs")
"""Settings of a loop that a Trainer's can have; model, optimizer and their state are the Trainer's to name."""
_CHOOSE = 'HotLoop(run="default") compiles in place, without measuring whether that pays'


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
        if unknown := sorted(set(settings) - set(_SETTINGS)):
            raise ConfigError(f"HotLoop({unknown[0]}=...): there is no such setting; expected {', '.join(_SETTINGS)}")
        self.run, self._settings = run, settings
        self._in_place: InPlace | None = None
        self._owned: OwnedStep | None = None
        self._compiled: pl.LightningModule | None = None
        self._batches = 0
        self._logging: Shadows | None = None
        self._given = False
        """The user compiled the module."""
        self._why: list[str] = []
        self._hints: list[str] = []
        self._last: tuple[LoopStatus | None, Status | None, RunRecord | None] = (None, None, None)

    # -- what people ask -------------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop | None:
        """The loop that owns the step of the fit that is going on, where one does."""
        return self._owned.loop if self._owned is not None else None

    def status(self) -> TrainerStatus:
        """Say what was asked for, what runs, or ran when the Trainer ended, and why it is not more."""
        loop, model, _ = self._now()
        why, hints = tuple(self._why), tuple(self._hints)
        return TrainerStatus(asked=self.run, owned=loop is not None, why=why, hints=hints, loop=loop, model=model)

    @property
    def record(self) -> RunRecord | None:
        """The run record of the fit that goes on, or of what the Trainer did last; None before."""
        return self._now()[2]

    def _now(self) -> tuple[LoopStatus | None, Status | None, RunRecord | None]:
        if self._owned is not None:
            loop = self._owned.loop
            return loop.status(), loop.compiled.status(), loop.record
        if self._in_place is None:
            return self._last
        return None, status(self._compiled) if self._compiled is not None else None, self._in_place.record

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Decide who owns the step, before the strategy wraps the module."""
        self._take_off()
        self._why, self._hints, self._last, self._given = [], [], (None, None, None), False
        if given := compiled_by_user(pl_module):
            self._why.append(f"{given}: taken as it is")
            self._hints.append(_AS_GIVEN)
            self._given = True
            self._keep_logging_out(pl_module)
        elif stage == "fit":
            self._why += why_not(trainer, pl_module)
        self._say()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place where no loop will own the step: the strategy has wrapped and sharded it now."""
        if self._why:
            self._compile_in_place(pl_module, folder=self._settings.get("record"))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.validate``; in a fit it is compiled already, or a loop's."""
        if trainer.state.fn != TrainerFn.FITTING and not self._given:
            self._compile_in_place(pl_module)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.test``."""
        if not self._given:
            self._compile_in_place(pl_module)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compile the module in place for ``trainer.predict``."""
        if not self._given:
            self._compile_in_place(pl_module)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the step to a loop, now that optimizer and checkpoint are there."""
        if self._why:
            return
        self._why += why_not_with(trainer.optimizers)
        if self._why:
            self._say()
            self._compile_in_place(pl_module, folder=self._settings.get("record"))
            return
        total = trainer.estimated_stepping_batches
        settings = {"total_steps": int(total) if math.isfinite(total) and total > 0 else None, **self._settings}
        self._owned = OwnedStep(trainer, pl_module, {"run": self.run, **settings})

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the batch that the coming step is a function of."""
        if self._owned is not None:
            self._owned.begin(batch)
        elif self._in_place is not None:
            self._in_place.step_begins()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write down what a step of the Trainer's own took."""
        if self._in_place is not None:
            self._batches += 1
            self._in_place.step_ends(self._batches)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the module as it was."""
        self._take_off()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave the module as it was, whatever ended the fit; the exception goes its way."""
        if self._owned is not None:
            self._owned.loop.account.failed(exception)
        self._take_off(exception)

    # -- how -------------------------------------------------------------------------------------------------------

    def _compile_in_place(self, module: pl.LightningModule, folder: Any = None) -> None:
        """Compile as far as it was asked for; nothing where the user did. A fit's record goes to its folder."""
        auto = self.run.strip().lower() == "auto"
        tier = Tier("eager") if auto or self._given else parse(self.run)
        settings = tier.settings if tier.compiles else {}
        self._in_place, self._batches = InPlace(module, self.run, settings, folder), 0
        self._compiled = module if settings else None
        for line in self._why:
            self._in_place.decided(f"the training step is the Trainer's own: {line}", logging.DEBUG)
        if auto and not self._given:
            self._hints.append(_CHOOSE)
        elif tier.graph:
            self._in_place.decided(f"run={self.run!r}: no loop owns the step, so it is not captured", logging.WARNING)

    def _keep_logging_out(self, module: pl.LightningModule) -> None:
        """Have the user's own compile break its graph at self.log, which it cannot trace on torch 2.13."""
        self._logging = Shadows(module)
        for name in ("log", "log_dict"):
            outside = torch.compiler.disable(own_method(module, name))  # type: ignore[no-untyped-call]
            self._logging.put(name, outside)

    def _say(self) -> None:
        for line in self._why:
            _log.warning("HotLoop(run=%r): the training step is the Trainer's own: %s", self.run, line)

    def _take_off(self, error: BaseException | None = None) -> None:
        if self._logging is not None:
            self._logging.take_off()
            self._logging = None
        if self._owned is None and self._in_place is None:
            return
        self._last = self._now()
        owned, kept, self._owned, self._in_place, self._compiled = self._owned, self._in_place, None, None, None
        if owned is not None:
            owned.close()
        if kept is not None:
            kept.close(error)
