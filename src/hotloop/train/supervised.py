"""The task of a recipe that learns from rows: a model and its loss as a program, with what only our recipes have."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop.step import Workload
from hotloop.train import environment, failures, sharding
from hotloop.train.average import Average
from hotloop.train.batches import Epochs
from hotloop.train.evaluate import evaluate, evaluating
from hotloop.train.optimizing import Rate, make_optimizer, parameter_groups
from hotloop.train.task import Show, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.train.batches import Batch, Data
    from hotloop.train.goal import Goal
    from hotloop.train.ranks import Devices
    from hotloop.train.start import Start
    from hotloop.train.task import Judge, Loss

REHEARSED = 4
"""Batches on which CUDA graphs are tried before they are turned on."""


class Supervised(Task):
    """A model that learns from rows.

    Precision, accumulated gradients, clipping, averages and the schedule are those of the group ``training``.

    Args:
        start: the run's settings.
        name: of the recipe.
        devices: Fabric on the device where it computes, and the processes that train together.
        model: gives an output of a batch's inputs by name.
        parts: the components by name, as `hotloop.compile` takes them; ``loss`` gives the mean loss of an output and
            a batch's labels.
        train, validation: the two sides of the split.
        judge: makes what judges a validation, of the loss.
        rows: what a row of the data is, in the plural.
        per_row: what throughput counts besides rows, and how many of it a row holds: ``{"tokens": 128}``.
        compiled: the components that a hot loop compiles; empty compiles all of the model.
        remarks: says by what the best validation is to be judged, of its metrics and of the record's measurements.
        fingerprint, goal, context, show, told: as for `Task`.
    """

    smaller = failures.SMALLER

    def __init__(  # noqa: PLR0913 - what a recipe is made of
        self,
        start: Start,
        name: str,
        devices: Devices,
        *,
        model: torch.nn.Module,
        parts: dict[str, Any],
        train: Data,
        validation: Data,
        fingerprint: str,
        judge: Callable[[Loss], Judge],
        goal: Goal,
        rows: str,
        per_row: Mapping[str, int] | None = None,
        context: Mapping[str, float] | None = None,
        remarks: Callable[[Mapping[str, float], Mapping[str, Any]], Sequence[str]] = lambda *_: (),
        compiled: Sequence[str] = (),
        show: Show | None = None,
        told: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.training = training = start.settings.training
        together, seed = training.gradient_accumulation, start.settings.run.seed
        rank, many = devices.ranks.rank, start.settings.run.devices
        self.model, self.train, self.validation, self._judge = model, train, validation, judge
        self.loader = Epochs(train, training.batch_size, seed, together, rank, many)
        size = min(training.batch_size, len(train))
        taken, device = {"samples": size * together * many}, devices.fabric.device
        self.fabric, self.scaler = devices.fabric, devices.scaler
        groups = parameter_groups(model.to(device), training.weight_decay)
        self.optimizer = make_optimizer(training, groups, fuse=self.scaler is None)  # a fused one scales by itself
        # The wrapper is for precision and device; checkpoints and compile deal with the model itself.
        self.wrapped, self._stepping = self.fabric.setup(model, self.optimizer)
        self.wrapped.train()
        self.average = None if training.ema_decay is None else Average(model, training.ema_decay)
        self._trained = [one for one in model.parameters() if one.requires_grad]
        self._max_norm = training.max_grad_norm or math.inf
        super().__init__(
            name=name,
            workload=Workload(
                {"model": model},
                self.optimizer,
                self.optimizer_step,
                self.loader,
                loss=self.loss,
                metrics=self.metrics,
                state=[one for one in (self.average, self.scaler) if one is not None],
            ),
            device=device,
            goal=goal,
            fingerprint=fingerprint,
            per_step={**taken, **{what: taken["samples"] * many for what, many in (per_row or {}).items()}},
            context={f"validation_{rows}": len(validation), **(context or {})},
            remarks=lambda best, measured, _: remarks(best, measured) if best else (),
            told=told or {},
            show=show and Show(self._shown(show.make), show.every, show.end and self._shown(show.end)),
            compiled={one: parts[one] for one in compiled},
            ranks=devices.ranks,
            wrappers=devices.wrappers,
        )
        self.parts = parts
        self.rate = Rate(self.optimizer, training)
        if rank:  # what is drawn in steps differs
            environment.seed(seed + rank)
        few = f"training.batch_size={training.batch_size}: batches are of the {size} rows to train on"
        self.lines = [few] if size < training.batch_size else []

    # -- training --------------------------------------------------------------------------------------------------

    def take(self, batch: Any, step: Callable[..., Any] | None) -> dict[str, float]:
        """Do an optimizer step; returns the mean loss, and the gradients' norm before clipping."""
        moved = [one.to(self.device) for one in batch]
        # One wait for the device a step, here, since nothing in a step may wait for it. A captured step is one piece,
        # so its loss is looked at behind it, and the run ends then, before anything of these parameters is saved.
        loss, norm = step(moved).tolist() if step else self._checked(moved)
        return {"loss": loss, "gradient_norm": norm, "learning_rate": self.rate.now}

    def _checked(self, batches: Sequence[Batch]) -> list[float]:
        """Do an optimizer step, unless its loss or gradients are lost: that is seen before they are written.

        Raises:
            TrainingFailedError: they are.
        """
        found: list[float] = self.gradients(batches).tolist()
        self._check(*found, applied=False)
        self.apply()
        return found

    def optimizer_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Do an optimizer step. Nothing in it waits for the device; gives what `gradients` gives."""
        found = self.gradients(batches)
        self.apply()
        return found

    def gradients(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Sum the batches' gradients up, and clip them.

        Returns:
            The mean loss and the gradients' norm before clipping: shape (2,), float32, on the batches' device.
        """
        total = torch.zeros((), device=batches[0].labels.device)
        for batch in batches:
            # The last batch averages over all processes. Fabric's enabled=False would leave FSDP2 averaging nothing.
            alone = batch is not batches[-1]
            with self.fabric.no_backward_sync(self.wrapped) if alone else contextlib.nullcontext():
                # A loss that is a function is replaced in `parts` once it is compiled.
                loss = self.parts["loss"](self.wrapped(**batch.inputs), batch.labels) / len(batches)
                self.fabric.backward(loss)
            total += loss.detach()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._max_norm)
        return torch.stack([total, sharding.whole(norm)])

    def apply(self) -> None:
        """Step the optimizer, drop the gradients, and take the parameters into the average."""
        self._stepping.step()
        self._stepping.zero_grad()
        if self.average is not None:
            self.average.update()

    def check_figures(self, figures: Mapping[str, float]) -> None:
        """Check a step's figures after the step."""
        self._check(figures["loss"], figures["gradient_norm"], applied=True)

    def _check(self, loss: float, norm: float, *, applied: bool) -> None:
        if not math.isfinite(loss) or (not math.isfinite(norm) and not self.overflows()):
            self.optimizer.zero_grad()
            raise failures.not_finite(loss, norm, self.rate.now, applied=applied)

    def overflows(self) -> bool:
        """Say whether gradients that are not finite are float16's overflow, for which the scaler leaves steps out.

        While it looks for its scale that is usual; where even gradients that were scaled down are not finite, it is not
        the scale.
        """
        return self.scaler is not None and self.scaler.get_scale() >= 1

    def amount(self, batch: Any) -> int:
        """Return the tokens of a step, padding included."""
        return sum(one.tokens for one in batch)

    # -- between the steps -----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Judge the model, or its average, on the validation side."""
        with self._averaged():
            judge = self._judge(self.parts["loss"])
            return evaluate(self.wrapped, judge, self.validation, self.training.eval_batch_size, self.device)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        return self.average.in_place() if self.average else contextlib.nullcontext()

    def _shown(self, make: Callable[[int], Mapping[str, float]]) -> Callable[[int], Mapping[str, float]]:
        def shown(step: int) -> Mapping[str, float]:
            with self._averaged(), evaluating(self.wrapped):
                return make(step)

        return shown

    def loss(self, batch: Sequence[Batch]) -> torch.Tensor:
        """Return the loss of a step's first batch, without training on it."""
        moved = batch[0].to(self.device)
        found: torch.Tensor = self.parts["loss"](self.wrapped(**moved.inputs), moved.labels)
        return found

    def probe(self, batch: Any) -> None:
        """Compute the loss of a step's first batch."""
        with evaluating(self.wrapped):
            self.loss(batch)

    # -- what fit asks for -----------------------------------------------------------------------------------------

    @functools.cached_property
    def rates(self) -> list[Rate]:
        """The schedule of the run."""
        return [self.rate]

    def others(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside the model."""
        kept = {
            "optimizer": self.optimizer,
            "rate": self.rate,
            "model.average": self.average,
            "scaler": self.scaler,
        }
        return {name: one for name, one in kept.items() if one is not None}

    def trial(self, names: Sequence[str]) -> Workload:
        """Return a copy of the training as it stands, on which the presets of these components are tried."""
        batches = [self.train.take(rows).to(self.device) for rows in self.loader.order()[:REHEARSED]]
        model, parts = copy.deepcopy((self.model, {name: self.parts[name] for name in names}))
        model.train()
        loss = parts.get("loss", self.parts["loss"])
        groups = parameter_groups(model, self.training.weight_decay)
        optimizer = make_optimizer(self.training, groups, fuse=self.scaler is None)

        def step(batch: Batch) -> torch.Tensor:
            with self.fabric.autocast():
                value: torch.Tensor = loss(model(**batch.inputs), batch.labels)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        def infer(batch: Batch) -> torch.Tensor:
            model.eval()
            with self.fabric.autocast():
                output: torch.Tensor = model(**batch.inputs)
            model.train()
            return output

        return Workload(parts, optimizer, step, batches, infer=infer)
