"""What ends a run before its time: the cause in the user's words, what to change, and the checkpoint that is kept."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from hotloop.errors import CompiledRunError, TrainingFailedError
from hotloop.train import configure

if TYPE_CHECKING:
    from pathlib import Path


def not_finite(loss: float, norm: float, learning_rate: float, *, applied: bool) -> TrainingFailedError:
    """Build the failure of a loss or gradient that is NaN or infinite.

    Args:
        loss: of the step.
        norm: of its gradients.
        learning_rate: of the step.
        applied: the optimizer has written the parameters with it.
    """
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
    done = (
        "the step was applied, so the parameters are lost, and no checkpoint holds them"
        if applied
        else ("the step was not applied")
    )
    return TrainingFailedError(
        f"{what} at learning rate {learning_rate:.3g}; {done}. Try a lower training.learning_rate, a "
        "longer training.warmup_fraction, training.max_grad_norm=1.0, or training.optimization.use_bf16=false"
    )


SMALLER = (
    "a smaller training.batch_size with more training.gradient_accumulation, a shorter model.max_length, "
    "training.optimization.use_bf16=true, or training.freeze_embeddings=true"
)
"""What takes less memory in a recipe."""


def explain(error: Exception, smaller: str = SMALLER) -> TrainingFailedError | None:
    """Put a failure of a step into words; None where it is not one of the known kinds and should stay itself."""
    if isinstance(error, TrainingFailedError):
        return error
    if isinstance(error, CompiledRunError):
        off = " ".join(f"compile.components.{error.component}.{mode}=none" for mode in ("training", "inference"))
        known = error.component.isidentifier()  # a program of several models has names that no setting has
        without = f"{off}, which leaves others compiled" if known else "compile.preset=aot_eager"
        return TrainingFailedError(
            f"{error} To go on without it: {without}, or training.optimization.use_torch_compile=false"
        )
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text or isinstance(error, MemoryError):
        return TrainingFailedError(
            f"out of memory: {text.splitlines()[0] if text else type(error).__name__} Try {smaller}"
        )
    return None


def with_checkpoint(
    failure: TrainingFailedError, doing: str, folder: Path, checkpoint: Path, again: str | None = None
) -> TrainingFailedError:
    """Add what was being done, and how to go on, to a failure's message; ``again`` is the command, if not the run's."""
    own = configure.again(folder, changed="<changed settings>")
    kept = (
        f"Kept: {checkpoint}. Resume with: {again or own}"
        if checkpoint.is_file()
        else "No checkpoint was written yet: start again with changed settings"
    )
    return TrainingFailedError(f"{doing}: {failure}. {kept}", alone=f"{doing}: {failure}")
