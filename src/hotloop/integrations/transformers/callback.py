"""The callback of transformers' Trainer."""

from __future__ import annotations

import contextlib
import logging
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from hotloop.compiling.control import Status, precompiled
from hotloop.errors import ConfigError
from hotloop.integrations.accelerate_state import asks, share_autocast, take_over, tell_tf32
from hotloop.integrations.in_place import InPlace
from hotloop.integrations.named import check_names
from hotloop.report import write_html
from hotloop.step import Loop
from hotloop.step.prove.sentinel import SHARE
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from hotloop.record import RunRecord
    from hotloop.step import LoopStatus, Pad

_log = logging.getLogger("hotloop")
_SEVERAL = "several processes run, whose steps stay the Trainer's own"
_OWN_STEP = "a plain Trainer keeps its training step to itself"
_GIVE_STEP = "HotTrainer in the place of Trainer gives the step to hotloop"
_OWN_LOOP = "hotloop.Loop runs whole steps in several processes, in a training loop of your own"
_IN_ANY_CASE = "HotLoop(run='default') compiles in place in any case"
_DROPS = (
    "wrapped, its forward names no arguments, so that the Trainer drops every column of the data set, unless "
    "TrainingArguments(remove_unused_columns=False)"
)
SETTINGS = ("run", "look", "buckets", "sentinel", "record")
"""What a `HotLoop` is given by name."""
_NO_RUN_YET = Status({}, hint="no training run has begun yet: trainer.train() decides what runs, and why")
_TAKEN_OUT = Status({}, hint="it was taken out of the Trainer's callbacks: the steps were the Trainer's own, eager")
_live: weakref.WeakSet[HotLoop] = weakref.WeakSet()
"""Every HotLoop that a Trainer has told of: a callback is not told which others there are."""


class StepOwner(Protocol):
    """A Trainer that hands its training step over: what `HotLoop` uses of it."""

    accelerator: Any
    state: Any

    def own_training_step(self) -> Callable[..., Any]:
        """Return the Trainer's own step as a function of all that differs from step to step."""


class HotLoop(TrainerCallback):
    """Compiles the model of a Trainer in place for the time of a training run, and tells what ran.

    The model is as it was when training has ended: what is saved carries eager's names in any case. What
    ``TrainingArguments(torch_compile=True)`` asks for is taken over, and applied once.

    Args:
        run: a preset or a tier, as `hotloop.Loop` takes it. ``"auto"`` measures where the step is hotloop's
            (`HotTrainer`). With a plain Trainer nothing measures whether a compile pays: ``"auto"`` is then what
            ``torch_compile`` asks for, else eager.
        look: look at some of the run's batches before anything is compiled (`Loop`'s ``batches``); for data sets that
            must not be read in this process before workers fork, False.
        buckets: what `Loop` takes, for a collator that pads each batch to a length of its own.
        sentinel: the share of time for checks of compiled steps, as `Loop` takes it.
        record: a folder for the run record; without one it is kept in memory.

    Raises:
        ConfigError: there is no such tier, preset or setting.
    """

    def __init__(
        self,
        run: str = "auto",
        *,
        look: bool = True,
        buckets: Mapping[str, Pad] | None = None,
        sentinel: float | None = SHARE,
        record: str | os.PathLike[str] | None = None,
        **unknown: Any,
    ) -> None:
        check_names("HotLoop", unknown, SETTINGS)
        if not isinstance(run, str):
            raise ConfigError(f"HotLoop(run={run!r}): expected 'auto', a tier or a preset, by name")
        self.tier = None if run.strip().lower() == "auto" else parse(run)
        self.run, self.look, self.buckets, self.sentinel, self.folder = run, look, buckets, sentinel, record
        self.loop: Loop | None = None
        self.step: Callable[..., Any] | None = None
        """Runs one training step of the Trainer that gave its own; None where it keeps it."""
        self._owner: weakref.ref[StepOwner] | None = None
        self._asked: dict[str, Any] = {}
        self._state: weakref.ref[Any] | None = None
        """The ``TrainerState`` of the Trainer, or of its run, that this callback was told of last."""
        self._last: Status | LoopStatus = _NO_RUN_YET
        self._record: RunRecord | None = None
        self._in_place: InPlace | None = None
        self._open = contextlib.ExitStack()

    # -- the Trainer's hooks ---------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - the Trainer's hook
        """Take over the compile that ``TrainingArguments`` asks for, so that it is not applied twice.

        Raises:
            ConfigError: the Trainer has another HotLoop.
        """
        self._be_the_only_one(state)
        asked = take_over(AcceleratorState().dynamo_plugin)
        if asked is None:
            return
        self._asked = asked
        _log.info("torch_compile=True of TrainingArguments: %s is applied by hotloop, once", asked["preset"])
        if args.device.type == "cuda" and ((args.tf32 is None and not args.fp16) or args.bf16):
            tell_tf32("transformers (TrainingArguments with torch_compile=True)")

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:  # noqa: ARG002
        """Compile the model, or give the step to a loop.

        Raises:
            ConfigError: the Trainer has another HotLoop.
        """
        self.end()
        self._be_the_only_one(state)
        model = parts["model"]
        if why := _not_ours(model, args):
            applied = asks(AcceleratorState().dynamo_plugin)
            self._keep(model, {}).differs(f"the model runs as it was given: {why[0]}", why[1], as_given=applied)
            return
        self._open.callback(_as_prepared, model, vars(model).get("forward"))
        share_autocast(model, args.device, AcceleratorState().mixed_precision, None)
        owner = self._owner() if self._owner is not None else None
        if owner is None or owner.state is not state or _several():  # another Trainer's, which has this callback too
            self._compile(model)
        else:
            left = max(1, state.max_steps - state.global_step)  # of a run that goes on, what is to come
            self._take_step(owner, model, parts, left * args.gradient_accumulation_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Note when an optimizer step of the Trainer's own begins."""
        if self._in_place is not None:
            self._in_place.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Write down what it took."""
        if self._in_place is not None:
            self._in_place.step_ends(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Take the compile off, and settle the record."""
        self.end()

    # -- what became of it -----------------------------------------------------------------------------------------

    def status(self) -> Status | LoopStatus:
        """Say what runs and why; after the run what ran in it; before the first one, that there was none."""
        if self.loop is not None:
            return self.loop.status()
        return self._in_place.status() if self._in_place is not None else self._last

    @property
    def record(self) -> RunRecord | None:
        """The record of the run that goes on, or of the last one."""
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
        """Leave the model as it was given. A Trainer that ends with an exception tells its callbacks nothing."""
        self._last = self.status()
        if self.loop is not None:
            self._record = self.loop.record
        self.step = self.loop = self._in_place = None
        opened, self._open = self._open, contextlib.ExitStack()
        opened.__exit__(type(error) if error else None, error, None)

    def leave(self) -> None:
        """Forget the Trainer, which has another HotLoop from now on."""
        self._state = self._owner = None

    # -- the two ways ----------------------------------------------------------------------------------------------

    def _be_the_only_one(self, state: Any) -> None:
        """Refuse a second HotLoop: each would compile the model, and take off what the other compiled."""
        told = [one for one in _live if one._state is not None and one._state() is state]  # noqa: SLF001 - its own kind
        if not told:
            self._state = weakref.ref(state)
            _live.add(self)
            return
        for one in told:
            one.end()
        runs = ", ".join(f"HotLoop(run={one.run!r})" for one in (*told, self))
        raise ConfigError(f"callbacks: {runs}: a Trainer takes one HotLoop; leave one of them in, once")

    def owned_by(self, trainer: StepOwner) -> None:
        """Take note of a Trainer that hands its steps over, from now on."""
        self._owner = weakref.ref(trainer)

    def begins(self, trainer: StepOwner, *, told: bool) -> None:
        """Take note of the Trainer whose run begins, and whether it will tell of it: several may have this callback."""
        self.owned_by(trainer)
        if not told:
            self._last = _TAKEN_OUT

    def _compile(self, model: torch.nn.Module) -> None:
        """Compile in place, for a Trainer that runs its steps itself."""
        settings = self._asked if self.tier is None else self.tier.settings if self.tier.compiles else {}
        before = precompiled(model)
        kept = self._keep(model, {} if before else settings)
        why, hint = (_SEVERAL, _OWN_LOOP) if _several() else (_OWN_STEP, _GIVE_STEP)
        if before is not None:
            kept.differs(f"the model runs as it was given: {before.reason}", before.hint)
        elif self.tier is None and settings:
            what = f"run='auto': preset {settings['preset']}, as torch_compile asks, with nothing measured"
            kept.differs(f"{what}: {why}", hint, logging.INFO)
        elif self.tier is None:
            kept.differs(f"run='auto': eager, with nothing measured: {why}", f"{hint}; {_IN_ANY_CASE}")
        elif self.tier.graph:
            kept.differs(f"run={self.run!r}: no step is captured, it runs {self.tier.base}: {why}", hint)

    def _keep(self, model: torch.nn.Module, settings: dict[str, Any]) -> InPlace:
        """Keep the record of steps that are the Trainer's own."""
        kept = self._in_place = InPlace(model, self.run, settings, self.folder)
        self._record = kept.record
        self._open.push(lambda _, error, __: kept.close(error))
        return kept

    def _take_step(self, owner: StepOwner, model: torch.nn.Module, parts: Mapping[str, Any], steps: int) -> None:
        """Give the Trainer's step to a loop."""
        scaler = getattr(owner.accelerator, "scaler", None)
        self.loop = self._open.enter_context(
            Loop(
                model,
                parts["optimizer"],
                state=() if scaler is None else scaler,
                run=self.run,
                total_steps=steps,
                buckets=self.buckets,
                batches=_batches(owner, parts["train_dataloader"]) if self.look else None,
                sentinel=self.sentinel,
                record=self.folder,
            )
        )
        if self._asked:
            instead = "which chooses by measuring" if self.tier is None else "which was named"
            self.loop.context.reports.decided(
                f"torch_compile=True of TrainingArguments (preset {self._asked['preset']}) gives way to "
                f"run={self.run!r}, {instead}; to compile so in any case: HotLoop(run={self._asked['preset']!r})",
                {"action": "give way"},
            )
        self.step = self.loop.step(owner.own_training_step())


def _not_ours(model: torch.nn.Module, args: Any) -> tuple[str, str] | None:
    """Say why a model is not hotloop's to compile, and what to change; None where it is."""
    if asks(AcceleratorState().dynamo_plugin):
        return (
            "torch_compile=True of TrainingArguments was applied by the Trainer",
            "hand it HotLoop when it is made, Trainer(..., callbacks=[HotLoop()]), which takes that over",
        )
    if hasattr(model, "_orig_mod") and (before := precompiled(model)) is not None:
        return before.reason, f"{before.hint}; {_DROPS}" if args.remove_unused_columns else before.hint
    if args.n_gpu > 1:
        return "the Trainer copies it to several GPUs at each step (DataParallel), and copies run eager", "use torchrun"
    return None


def _several() -> bool:
    """Tell whether Accelerate wraps the model for several processes, or hands its steps to DeepSpeed."""
    return bool(AcceleratorState().distributed_type != DistributedType.NO)


def _as_prepared(model: torch.nn.Module, forward: Any) -> None:
    """Put back the forward that Accelerate gave the model."""
    if forward is not None and "forward" in vars(model):
        model.forward = forward


def _batches(trainer: Any, loader: Any) -> DataLoader[Any] | None:
    """Give the run's batches as the arguments of a step; None where they cannot be looked at."""
    dataset: Any = getattr(loader, "dataset", None)
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(loader, DataLoader) or sampler is None or isinstance(dataset, IterableDataset):
        return None
    counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None

    def collate(samples: list[Any]) -> tuple[Any, ...]:
        batch = loader.collate_fn(samples)
        items = torch.zeros((), dtype=torch.int64) if counts and "labels" in batch else None
        return batch, items, 1

    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
