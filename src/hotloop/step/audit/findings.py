"""What the audit of one step found."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hotloop.step.guard.compare import Watch
    from hotloop.step.obstacle import Obstacle


_SPARSE = (
    "torch computes with sparse tensors by cuSPARSE, which synchronises: keep rows, columns and values in dense "
    "tensors, and write the product out, y = torch.zeros(n, x.shape[1], device=x.device).index_add(0, rows, "
    "values[:, None] * x[columns])"
)


@dataclasses.dataclass
class AuditFindings:
    """What one step did."""

    operations: int = 0
    random_operations: int = 0
    drops_in_rnn: tuple[str, int] | None = None
    """The line that runs an RNN of cuDNN's with dropout, which keeps a random state of its own."""
    matrix_dtypes: set[torch.dtype] = dataclasses.field(default_factory=set)
    """Floating dtypes that matrix products and convolutions computed in: autocast's show nowhere else."""
    obstacles: list[Obstacle] = dataclasses.field(default_factory=list)
    stepped: list[str] = dataclasses.field(default_factory=list)
    """Names of the optimizers that stepped, in order."""
    read_gradients: set[str] = dataclasses.field(default_factory=set)
    """Parameters whose gradient, as it was at the start, took part in the step."""
    updated: set[str] = dataclasses.field(default_factory=set)
    """Parameters that with their optimizer state are what one step of an optimizer made of the gradient that is left:
    nothing else wrote into any of these."""
    computes_on: bool = False
    """Gradients were computed with parameters that an optimizer had stepped before, in the same step: a GAN does."""
    checks: list[Obstacle] = dataclasses.field(default_factory=list)
    """Host reads in checks of libraries, which a recording of eager code leaves out."""
    constants: list[Obstacle] = dataclasses.field(default_factory=list)
    """Tensors made on the host that are copied to the device, which a recording of eager code keeps."""
    constant_bytes: int = 0
    """The host memory that these take."""
    altered: bool = False
    """Gradients were written after an optimizer had found them: ``zero_grad(set_to_none=False)``."""
    recounted: set[str] = dataclasses.field(default_factory=set)
    """Buffers that its backward wrote: a checkpoint ran its forward again, which compiled code does not show twice."""
    sparse: bool = False
    """The step computes with sparse tensors."""
    begins: bool = False
    """An average of weights began in this step: each later one does other things."""
    asked: bool = False
    """Code of the step asked whether a capture is going on."""
    written_found: list[torch.Tensor] = dataclasses.field(default_factory=list)
    """Tensors from outside the step that it wrote into, and that the holdings did not know."""
    on_host: list[int] = dataclasses.field(default_factory=list)
    """Which tensors among the leaves of its result were on the host."""
    skipped: bool = False
    """A GradScaler skipped the step of an optimizer: what that does is not known yet."""
    set_up_seconds: float = 0.0
    """Seconds in operations that took long: a library was set up, a kernel read from a cold disk."""
    stopped: bool = False
    """The audit ended before the step did: what is here is a part of what the step does."""
    failed: Obstacle | None = None
    """Something of ours failed as it looked at the step, which is why the audit ended."""
    read: Watch | None = None
    """Looks at what of Python's state its code has read; None where that was not heard."""
    found: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What `read` was when the audit ended."""

    def explained(self, failed: Obstacle) -> Obstacle:
        """Return why a capture failed, with what the step is known to do that no capture allows."""
        by_sparse = self.sparse and any(word in failed.reason.lower() for word in ("captur", "cusparse"))
        return dataclasses.replace(failed, hint=_SPARSE) if by_sparse else failed
