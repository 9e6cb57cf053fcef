"""What the audit of one step found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import describe
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hotloop.step.watch.plain import PlainWatch
    from hotloop.step.watch.stream import Line

FAILED = "hotloop failed as it looked at the step"
_REPORT_IT = "the step trains on without this tier; please report this line to hotloop"
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
    drawn: set[str] = dataclasses.field(default_factory=set)
    """Names of torch's random streams that it drew from."""
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
    stopped: bool = False
    """The audit ended before the step did: what is here is a part of what the step does."""
    failed: Obstacle | None = None
    """Something of ours failed as it looked at the step, which is why the audit ended."""
    stream: list[Line] = dataclasses.field(default_factory=list)
    """Its operations, which later steps are compared with."""
    watch: PlainWatch | None = None
    """Watches plain values that it may have read."""

    def changed(self) -> list[str]:
        """Name the watched values that have changed since the last look."""
        return [] if self.watch is None else self.watch.changed()

    def explained(self, failed: Obstacle) -> Obstacle:
        """Return why a capture failed, with what the step is known to do that no capture allows."""
        by_sparse = self.sparse and any(word in failed.reason.lower() for word in ("captur", "cusparse"))
        return dataclasses.replace(failed, hint=_SPARSE) if by_sparse else failed


class Look:
    """A look at one step, while it runs.

    Attributes:
        seen: what was seen so far, known also of a step that raises.
        ends: asked after each operation whether the rest of the step runs unobserved.
    """

    def __init__(self, ends: Callable[[AuditFindings], bool] = lambda _: False) -> None:
        self.seen, self.ends = AuditFindings(), ends

    def ours(self, look: Callable[..., Any], *args: Any) -> Any:
        """Call what is ours amid the user's step. Where it fails, the step goes on unobserved, and is declined."""
        if self.seen.stopped:
            return None
        try:
            return look(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is none of the user's
            # Its Python has to run once: nobody saw what the step does.
            self.seen.failed = Obstacle(f"{FAILED}: {described(error)}", _REPORT_IT, not_repeatable=True)
            self.seen.obstacles, self.seen.stopped = [self.seen.failed], True
            return None


def described(error: BaseException) -> str:
    """Describe an exception of ours, with the line of ours that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
    return f"{describe(error)}{at}"
