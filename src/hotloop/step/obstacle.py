"""The reason why a step cannot be captured or repeated, and the failure of a candidate: small types for every room."""

from __future__ import annotations

import dataclasses
import linecache

RUNS = "a proof runs the step twice, and a replay runs none of its Python"
"""Why what a step does beside its tensors belongs outside of it; true in tiers with a graph and without."""
DRAW_FROM_TORCH = (
    "draw from torch's own stream, without generator=: a recording takes that one along, and a replay makes no other"
)
INTO_IT = "write into the memory that it has: tensor.data.copy_(...), .mul_(), .lerp_(), .clamp_()"
"""The remedy where a tensor is given other memory (``parameter.data = ``), in the step or between two."""


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """The reason why a step cannot be captured, the user's line, and how to change it.

    ``not_repeatable``: the step's Python must run exactly once per step, so a proof cannot run it a second time.
    """

    reason: str
    hint: str
    file: str | None = None
    line: int | None = None
    not_repeatable: bool = False

    @property
    def source(self) -> str:
        """The user's line of code."""
        return linecache.getline(self.file, self.line).strip() if self.file and self.line else ""

    def __str__(self) -> str:
        at = f" at {self.file}:{self.line}: {self.source}" if self.file else ""
        return f"{self.reason}{at}"


class CandidateFailedError(Exception):
    """The candidate raised; ``__cause__`` is its exception. Everything it did was undone, unless ``undone`` is False.

    ``began``: the candidate had begun to run. Otherwise the copies that would undo it could not be made, and no other
    process is waiting in the candidate.
    """

    def __init__(self, *, undone: bool = True, began: bool = True) -> None:
        super().__init__("the candidate of a proof failed")
        self.undone, self.began = undone, began
