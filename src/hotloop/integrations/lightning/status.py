"""What the callback asked for, what runs, and why not more: one object for people and for code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.control import Status
    from hotloop.step import LoopStatus


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """The status of a model in a Trainer.

    Args:
        asked: what ``run=`` asked for.
        owned: whether a `hotloop.Loop` owns the training step; else the model is at most compiled in place.
        why: why the step is not owned, a whole step not captured, or nothing compiled; empty where all is as asked.
        hints: what to change.
        loop: the loop's status, where there is one.
        model: the status of the compiled model.
    """

    asked: str
    owned: bool
    why: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    loop: LoopStatus | None = None
    model: Status | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give the status as plain JSON data."""
        return {
            "asked": self.asked,
            "owned": self.owned,
            "why": list(self.why),
            "hints": list(self.hints),
            "loop": self.loop.to_dict() if self.loop is not None else None,
            "model": self.model.to_dict() if self.model is not None else None,
        }

    def __str__(self) -> str:
        parts = [f"hotloop in Lightning's Trainer (asked for: {self.asked})"]
        parts += [str(one) for one in (self.loop, self.model) if one is not None]
        parts += [f"the step is the Trainer's own: {one}" for one in self.why]
        parts += [f"hint: {one}" for one in self.hints]
        return "\n".join(parts)
