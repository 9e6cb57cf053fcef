"""What the conformance suite fits: a small real model, one fit that is asked for, and what it left."""

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

_WIDTH, _LENGTH, _WORDS, _CLASSES = 8, 5, 11, 3
_BATCH, _SHORT = 6, 4


class SmallClassifier(nn.Module):
    """What a real model has and a toy has not: attention, dropout, buffers that a step moves, and a tied weight.

    Called with token ids, shape (batch, length); gives logits, shape (batch, 3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.attention = nn.MultiheadAttention(_WIDTH, 2, dropout=0.1, batch_first=True)
        self.norm = nn.BatchNorm1d(_WIDTH)
        self.drop = nn.Dropout(0.1)
        self.widen = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.widen.weight = self.embed.weight
        self.head = nn.Linear(_WORDS, _CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Classify token ids."""
        found = self.embed(ids)
        found = found + self.attention(found, found, found, need_weights=False)[0]
        logits: torch.Tensor = self.head(self.drop(self.widen(self.norm(found.mean(1)))).relu())
        return logits


def small_batches(count: int, *, ragged: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Give batches for `SmallClassifier`, token ids and labels, the last one short if ``ragged``; always the same."""
    draws = torch.Generator().manual_seed(7)
    sizes = [_BATCH] * (count - ragged) + [_SHORT] * ragged
    return [
        (torch.randint(_WORDS, (size, _LENGTH), generator=draws), torch.randint(_CLASSES, (size,), generator=draws))
        for size in sizes
    ]


def plain_python(*, counting: bool = False) -> SimpleNamespace:
    """Give Python that a program keeps beside its tensors; no object of ours, which are none of a program's state."""
    return SimpleNamespace(counting=counting, steps=0, weight=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """One fit that an integration is asked for.

    Args:
        model: to be trained, as `Conformance.model` gave it.
        batches: of one epoch, in order; as `Conformance.batches` gave them.
        validation: batches to validate on after each epoch; empty for no validation.
        epochs: how many there are in all: a resumed run goes on until it has done so many.
        accumulate: batches for each optimizer step.
        run: what hotloop is asked for; None for the framework's own eager run, without hotloop.
        save: where to write a checkpoint when the fit has ended; None for none.
        resume: a checkpoint to go on from; None to begin.
        device: where model and batches are, and the fit has to run: ``"cpu"`` or ``"cuda"``.
        begin: to be called before each training batch, outside of the step: where a user's callback would be.
        python: what the user's own step (``training_step``, ``compute_loss``) reads and counts in Python, in the
            integration's own file: ``loss = loss * python.weight``, with the loss as the model gives it, and
            ``python.steps += 1`` where ``python.counting``. It is taken out of the task before (``python =
            task.python``): objects of hotloop's own are no state of a program.
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
    """What a fit left.

    Args:
        model: the module of the task as the fit left it: the same object.
        losses: of each training batch of this fit, in order.
        optimizer: the ``state_dict`` of the optimizer, or whatever of it the framework lets one read.
        status: what the integration says of itself: ``str()`` for people, ``to_dict()`` as JSON; None without hotloop.
        record: the run record, where the integration keeps one.
        remove: takes the integration off the model again; nothing without hotloop.
    """

    model: nn.Module
    losses: Sequence[float]
    optimizer: Mapping[str, Any] | None = None
    status: Any = None
    record: RunRecord | None = None
    remove: Callable[[], None] = lambda: None


def flat(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Give what a nest of mappings and sequences holds, each value by its path."""
    if isinstance(nested, torch.Tensor) or not isinstance(nested, dict | list | tuple):
        return {prefix: nested}
    items = nested.items() if isinstance(nested, dict) else enumerate(nested)
    return {path: value for key, one in items for path, value in flat(one, f"{prefix}.{key}").items()}


def placed(value: Any, device: str) -> Any:
    """Give a nest of tensors on a device, in the same form."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: placed(one, device) for key, one in value.items()}
    return type(value)(placed(one, device) for one in value) if isinstance(value, list | tuple) else value


def said(fitted: Fitted) -> str:
    """Give all that status and record say of a run, as one text."""
    status = {} if fitted.status is None else fitted.status.to_dict()
    record = {} if fitted.record is None else fitted.record.document
    return json.dumps([status, str(fitted.status), record], default=str)


def inventory(model: nn.Module) -> dict[str, Any]:
    """Give what a fit with hotloop could leave behind in a model, by module: attributes, hooks, entries."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} attributes"] = sorted(vars(module))
        found[f"{name} entry"] = get_entry(module) is not None
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        found[f"{name} hooks"] = hooks
    return found
