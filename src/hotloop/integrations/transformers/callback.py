"""The callback of transformers' Trainer."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from hotloop._torch.sharded import is_sharded
from hotloop._torch.wrappers import why_not_at_first
from hotloop.compiling.control import Status, precompiled
from hotloop.errors import ConfigError
from hotloop.integrations.accelerate_state import report_tf32, share_autocast, take_over, wants_compile
from hotloop.integrations.in_place import InPlace
from hotloop.integrations.setting_names import check_names
from hotloop.integrations.several import FLAT, UNCOMPILED, first_speaks
from hotloop.report import write_html
from hotloop.step import Loop
from hotloop.step.prove.schedule import SHARE
from hotloop.step.tiers import Tier, tier_of_setting

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    import torch

    from hotloop.presets import Preset
    from hotloop.record import RunRecord
    from hotloop.step import LoopStatus, Pad

SETTINGS = ("run", "buckets", "sentinel", "checks", "record")
"""The arguments of `HotLoop` by name."""
_PLAIN = (
    "a plain Trainer keeps its training step to itself",
    "HotTrainer in the place of Trainer gives the step to hotloop",
)
_live: weakref.WeakSet[HotLoop] = weakref.WeakSet()
"""Every HotLoop that a Trainer has called: a callback is not told of the other callbacks of its Trainer."""


class HotLoop(TrainerCallback):
    """A callback that compiles the model of a Trainer in place during a training run, and reports what ran.

    The model is as it was when training has ended, and saved files carry eager's names in any case. A compile that
    ``TrainingArguments(torch_compile=True)`` asks for is taken over, and applied once.

    Args:
        run: a preset or a tier, as `hotloop.Loop` takes it. ``"auto"`` measures where the step is hotloop's
            (`HotTrainer`). With a plain Trainer nothing measures whether a compile pays: ``"auto"`` is then what
            ``torch_compile`` asks for, else eager.
        buckets: as `Loop` takes them, for a collator that pads each batch to a length of its own.
        sentinel: the share of time for checks of compiled steps, as `Loop` takes it.
        record: a folder for the run record; without one it is kept in memory.

    Raises:
        ConfigError: a tier, preset or setting does not exist.
    """

    def __init__(
        self,
        run: str | Preset = "auto",
        *,
        buckets: Mapping[str, Pad] | None = None,
        sentinel: float | None = SHARE,
        record: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ) -> None:
        check_names("HotLoop", unknown, SETTINGS)
        self.tier, self._asked = tier_of_setting(run), run
        self.run = run if isinstance(run, str) else run.name
        self.buckets, self.folder, self.sentinel = buckets, record, sentinel
        self.loop: Loop | None = None
        self.step: Callable[..., Any] | None = None
        """Runs a training step of the Trainer that handed its own over; None where the Trainer keeps it."""
        self._owner: weakref.ref[Any] | None = None
        self._requested: dict[str, Any] = {}
        """The settings of the compile that ``TrainingArguments`` asks for."""
        self._state: weakref.ref[Any] | None = None
        """The ``TrainerState`` of the Trainer, or of its run, that called this callback last."""
        hint = "no training run has begun yet: trainer.train() decides what runs, and why"
        self._last: Status | LoopStatus = Status({}, hint=hint)
        self._record: RunRecord | None = None
        self._in_place: InPlace | None = None
        self._open = contextlib.ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and status, for a copy or a pickle; loop, record and Trainer are of this process."""
        here = dict.fromkeys(("loop", "step", "_owner", "_state", "_record", "_in_place"))
        return {**vars(self), **here, "_open": contextlib.ExitStack(), "_last": self.status()}

    # -- the Trainer's hooks ---------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take over the compile that ``TrainingArguments`` asks for, so that it is not applied twice.

        Raises:
            ConfigError: the Trainer has another HotLoop.
        """
        self._refuse_second(state)
        requested = take_over(AcceleratorState().dynamo_plugin)
        if requested is None:
            return
        self._requested = requested
        logging.getLogger("hotloop").info(
            "torch_compile=True of TrainingArguments: %s is applied by hotloop, once", requested["preset"]
        )
        if args.device.type == "cuda" and ((args.tf32 is None and not args.fp16) or args.bf16):
            report_tf32("transformers (TrainingArguments with torch_compile=True)")

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Compile the model, or give the step to a loop.

        Raises:
            ConfigError: the Trainer has another HotLoop.
        """
        self.end()
        self._refuse_second(state)
        model = parts["model"]
        by_trainer = wants_compile(AcceleratorState().dynamo_plugin)
        if obstacle := _obstacle(model, args, compiled_by_trainer=by_trainer):
            reason, hint = obstacle
            kept = self._keep_record(model, {})
            kept.differs(f"the model runs as it was given: {reason}", hint, compiled_by_trainer=by_trainer)
            return
        self._open.callback(_restore_forward, model, vars(model).get("forward"))
        share_autocast(model, args.device, AcceleratorState().mixed_precision, None)
        owner = self._owner() if self._owner is not None else None
        # This callback may be in several Trainers: the step is the loop's only in a run of the owner.
        mine = owner if owner is not None and owner.state is state else None
        stays = self._why_the_trainers(mine)
        if mine is None or stays is not None:
            self._compile(model, *(stays or _PLAIN))
        else:
            left = max(1, state.max_steps - state.global_step)  # a resumed run has done some of its steps
            self._take_step(mine, mine.model_wrapped, parts, left * args.gradient_accumulation_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the time at which an optimizer step of the Trainer's own begins."""
        if self._in_place is not None:
            self._in_place.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the seconds of the step."""
        if self._in_place is not None:
            self._in_place.step_ends(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the compile off, and settle the record."""
        self.end()

    # -- the outcome -----------------------------------------------------------------------------------------------

    def status(self) -> Status | LoopStatus:
        """Return what runs and why; after a run, what ran in it; before the first run, a status that says so."""
        if self.loop is not None:
            return self.loop.status()
        return self._in_place.status() if self._in_place is not None else self._last

    @property
    def record(self) -> RunRecord | None:
        """The record of the current run, or of the last one."""
        return self.loop.record if self.loop is not None else self._record

    def report(self, path: str | os.PathLike[str]) -> None:
        """Write the run record as one self-contained HTML page.

        Raises:
            ConfigError: there was no run yet.
        """
        if self.record is None:
            raise ConfigError("report: there is no record before the first training run")
        write_html(self.record.document, path)

    def end(self, error: BaseException | None = None) -> None:
        """End a run: leave the model as it was given. A Trainer that raises calls no callback, so `HotStep` does."""
        self._last = self.status()
        if self.loop is not None:
            self._record = self.loop.record
        self.step = self.loop = self._in_place = None
        opened, self._open = self._open, contextlib.ExitStack()
        opened.__exit__(type(error) if error else None, error, None)

    # -- what `HotStep` calls --------------------------------------------------------------------------------------

    def owned_by(self, trainer: Any) -> None:
        """Register the Trainer that hands its steps over from now on."""
        self._owner = weakref.ref(trainer)

    # -- the two ways to run ---------------------------------------------------------------------------------------

    def _refuse_second(self, state: Any) -> None:
        """Refuse a second HotLoop: each would compile the model, and take off what the other compiled."""
        others = [other for other in _live if other._state is not None and other._state() is state]  # noqa: SLF001
        if not others:
            self._state = weakref.ref(state)
            _live.add(self)
            return
        for other in others:
            other.end()
        runs = ", ".join(f"HotLoop(run={hot.run!r})" for hot in (*others, self))
        raise ConfigError(f"callbacks: {runs}: a Trainer takes one HotLoop, in callbacks=, once")

    def agrees(self) -> bool:
        """Return whether several processes are to agree on what runs their steps.

        They agree on what `auto` chooses and on captured steps; a compile that ``torch_compile`` asks for is in place.
        """
        agreed = not self._requested if self.tier is None else self.tier.graph
        return agreed and _has_several_processes()

    def _why_the_trainers(self, owner: Any) -> tuple[str, str] | None:
        """Return why the Trainer keeps its step, and what to change; None where a loop takes it.

        Args:
            owner: the Trainer that hands its step over; None for a plain one.
        """
        if _has_several_processes() and not self.agrees():
            hint = "HotTrainer captures it in all of them with a tier that has a graph: HotLoop(run='eager+graph')"
            return "several processes run, whose steps stay the Trainer's own", hint
        if owner is None:
            return _PLAIN
        return _why_not_together(owner, self.tier) if _has_several_processes() else None

    def _compile(self, model: torch.nn.Module, why: str, hint: str) -> None:
        """Compile in place, for a Trainer that runs its steps itself for this reason; the hint says what to change."""
        settings = self._requested if self.tier is None else self.tier.settings if self.tier.compiles else {}
        before = precompiled(model)
        kept = self._keep_record(model, {} if before else settings)
        if before is not None:
            kept.differs(f"the model runs as it was given: {before.reason}", before.hint)
        elif self.tier is None and settings:
            what = f"run='auto': preset {settings['preset']}, as torch_compile asks, with nothing measured"
            kept.differs(f"{what}: {why}", hint, logging.INFO)
        elif self.tier is None:
            hint = f"{hint}; HotLoop(run='default') compiles in place in any case"
            kept.differs(f"run='auto': eager, with nothing measured: {why}", hint)
        elif self.tier.graph or self.tier.channels_last:
            what = "captured" if self.tier.graph else "laid out"
            runs = self.tier.base if self.tier.compiles else "eager"
            kept.differs(f"run={self.run!r}: no step is {what}, it runs {runs}: {why}", hint)

    def _keep_record(self, model: torch.nn.Module, settings: dict[str, Any]) -> InPlace:
        """Compile the model with these settings, and keep the record of steps that the Trainer runs itself."""
        kept = self._in_place = InPlace(model, self.run, settings, self.folder)
        self._record = kept.record
        self._open.push(lambda _, error, __: kept.close(error))
        return kept

    def _take_step(self, owner: Any, model: torch.nn.Module, parts: Mapping[str, Any], steps: int) -> None:
        """Hand the Trainer's step to a loop."""
        scaler = getattr(owner.accelerator, "scaler", None)
        with first_speaks():
            loop = Loop(
                model,
                parts["optimizer"],
                state=() if scaler is None else scaler,
                run=self._asked,
                total_steps=steps,
                buckets=self.buckets,
                sentinel=self.sentinel,
                record=self.folder,
            )
        self.loop = self._open.enter_context(loop)
        if self._requested:
            instead = "which chooses by measuring" if self.tier is None else "which was named"
            preset = self._requested["preset"]
            self.loop.context.reports.decided(
                f"torch_compile=True of TrainingArguments (preset {preset}) gives way to run={self.run!r}, {instead}; "
                f"to compile so in any case: HotLoop(run={preset!r})",
                {"action": "give way"},
            )
        self.step = self.loop.step(owner.own_training_step())


def _obstacle(model: torch.nn.Module, args: Any, *, compiled_by_trainer: bool) -> tuple[str, str] | None:
    """Return why hotloop must not compile a model, and what to change; None where it may."""
    if compiled_by_trainer:
        return (
            "torch_compile=True of TrainingArguments was applied by the Trainer",
            "hand it HotLoop when it is made, Trainer(..., callbacks=[HotLoop()]), which takes that over",
        )
    if hasattr(model, "_orig_mod") and (before := precompiled(model)) is not None:
        return before.reason, before.hint
    if args.n_gpu > 1:
        return "the Trainer copies it to several GPUs at each step (DataParallel), and copies run eager", "use torchrun"
    return None


def _has_several_processes() -> bool:
    """Return whether Accelerate wraps the model for several processes, or hands its steps to DeepSpeed."""
    return bool(AcceleratorState().distributed_type != DistributedType.NO)


def _why_not_together(trainer: Any, tier: Tier | None) -> tuple[str, str] | None:
    """Return why several processes cannot capture a Trainer's steps, and what to change; None where they can.

    Args:
        trainer: the Trainer, whose model Accelerate has wrapped or sharded.
        tier: what was asked for; None for ``"auto"``.
    """
    wrapped, kind = trainer.model_wrapped, AcceleratorState().distributed_type
    if kind == DistributedType.FSDP and is_sharded(wrapped):  # a model that transformers shards at loading has hooks
        return _why_not_sharded(trainer, tier)
    if not isinstance(wrapped, DistributedDataParallel):
        if kind == DistributedType.FSDP:
            return FLAT, "TrainingArguments(fsdp_config={'version': 2}) shards by it"
        return f"{kind.value} runs the step in a way of its own", "HotLoop(run='default') compiles the model in place"
    if not (why := why_not_at_first(wrapped)):
        return None
    if wrapped.find_unused_parameters:
        return why, "TrainingArguments(ddp_find_unused_parameters=False) leaves it out; unset, the Trainer sets it"
    return why, "without that, the processes capture the step together"


def _why_not_sharded(trainer: Any, tier: Tier | None) -> tuple[str, str] | None:
    """Return why steps of a model that FSDP2 has sharded are not captured, and what to change; None where they are."""
    if tier is not None and tier.compiles:
        return UNCOMPILED, "HotLoop(run='eager+graph') captures them"
    each = trainer.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
    if trainer.args.gradient_accumulation_steps > 1 and not each:
        settings = "TrainingArguments(accelerator_config={'gradient_accumulation_kwargs': {'sync_each_batch': True}})"
        why = "gradients are accumulated, and FSDP2 keeps whole ones between two calls then, which no recording knows"
        return why, f"{settings} reduces them in each call, which takes less memory and more communication"
    return None


def _restore_forward(model: torch.nn.Module, forward: Any) -> None:
    """Restore the forward that Accelerate put on the model, which `share_autocast` replaced."""
    if forward is not None and "forward" in vars(model):
        model.forward = forward
