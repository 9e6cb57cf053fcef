"""The model and data of the conformance suite, the fit that it asks for (`Task`), and its outcome (`Fitted`)."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotloop._torch.module import get_entry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hotloop.record import RunRecord


class SmallClassifier(nn.Module):
    """A small model with the parts of a real one: attention, dropout, buffers that a step moves, and a tied weight.

    Takes token ids from 0 to 10, int64 of shape (batch, length); returns logits, float32 of shape (batch, 3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.1)
        self.widen = nn.Linear(8, 11, bias=False)
        self.widen.weight = self.embed.weight
        self.head = nn.Linear(11, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Classify token ids."""
        hidden = self.embed(ids)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        logits: torch.Tensor = self.head(self.drop(self.widen(self.norm(hidden.mean(1)))).relu())
        return logits


def small_batches(count: int, *, ragged: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches for `SmallClassifier`, the same in each call.

    Args:
        count: how many.
        ragged: whether the last batch is short: 4 rows instead of 6.

    Returns:
        Token ids, int64 of shape (rows, 5), and labels from 0 to 2, int64 of shape (rows,), for each batch.
    """
    draws = torch.Generator().manual_seed(7)
    sizes = [6] * (count - ragged) + [4] * ragged
    return [
        (torch.randint(11, (size, 5), generator=draws), torch.randint(3, (size,), generator=draws)) for size in sizes
    ]


def plain_python() -> SimpleNamespace:
    """Make the Python state of a program; no class of ours, since hotloop does not watch its own objects."""
    return SimpleNamespace(weight=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A fit that the suite asks an integration for.

    Args:
        model: to be trained, as `Conformance.model` returned it.
        batches: of one epoch, in order; as `Conformance.batches` returned them.
        validation: batches to validate on after each epoch; empty for no validation.
        epochs: how many there are in all, those before a resume included.
        accumulate: batches for each optimizer step.
        run: the tier or preset for hotloop; None for the framework's own eager run, without hotloop.
        save: where to write a checkpoint when the fit has ended; None for none.
        resume: a checkpoint to go on from; None to begin.
        device: where model and batches are, and the fit has to run: ``"cpu"`` or ``"cuda"``.
        begin: to be called before each training batch, outside of the step, as a user's callback is.
        python: Python state that the user's own step (``training_step``, ``compute_loss``) reads, in the integration's
            own file: ``loss = loss * python.weight``, with the loss of the model. Take it out of the task before the
            step (``python = task.python``): hotloop does not watch its own objects, such as the task.
    """

    model: nn.Module
    batches: Sequence[Any]
    validation: Sequence[Any] = ()
    epochs: int = 1
    accumulate: int = 1
    run: str | None = None
    save: Path | None = None
    resume: Path | None = None
    device: str = "cpu"
    begin: Callable[[], None] = lambda: None
    python: SimpleNamespace = dataclasses.field(default_factory=plain_python)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The outcome of a fit.

    Args:
        model: the module of the task after the fit: the same object.
        losses: of each training batch of this fit, in order.
        optimizer: the ``state_dict`` of the optimizer, or the part of it that the framework lets users read.
        status: the integration's status: ``str()`` for people, ``to_dict()`` as JSON; None without hotloop.
        record: the run record, if the integration keeps one.
        remove: takes the integration off the model again; does nothing without hotloop.
    """

    model: nn.Module
    losses: Sequence[float]
    optimizer: Mapping[str, Any] | None = None
    status: Any = None
    record: RunRecord | None = None
    remove: Callable[[], None] = lambda: None

    def text(self) -> str:
        """Return everything that status and record say of the fit."""
        status = {} if self.status is None else self.status.to_dict()
        record = {} if self.record is None else self.record.document
        return json.dumps([status, str(self.status), record], default=str)


def flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings and sequences by their paths."""
    if isinstance(nested, torch.Tensor) or not isinstance(nested, dict | list | tuple):
        return {prefix: nested}
    items = nested.items() if isinstance(nested, dict) else enumerate(nested)
    return {path: value for key, item in items for path, value in flatten(item, f"{prefix}.{key}").items()}


def to_device(value: Any, device: str) -> Any:
    """Return nested tensors on a device, in the same nesting."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    return type(value)(to_device(item, device) for item in value) if isinstance(value, list | tuple) else value


def inventory(model: nn.Module) -> dict[str, Any]:
    """Return all that a fit with hotloop could leave behind in a model, by module: attributes, hooks, entries."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} attributes"] = sorted(vars(module))
        found[f"{name} entry"] = get_entry(module) is not None
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        found[f"{name} hooks"] = hooks
    return found
