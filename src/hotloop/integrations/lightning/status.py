"""What the callback asked for, what runs, and why not more: one object for people and for code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    from hotloop.compiling.control import Status
    from hotloop.record import RunRecord
    from hotloop.step import LoopStatus

    Seen: TypeAlias = tuple[LoopStatus | None, Status | None, RunRecord | None]


_REMEDIES = {
    "closure variable trainer[": "a captured step cannot follow what changes of the Trainer at every step: have "
    "on_train_batch_start write it into a buffer of the module's (self.scale.fill_(...)), and training_step read that",
    "returns a Python number": "what training_step logs is returned by the step as well: log a number in "
    "on_train_batch_end, or a tensor",
}
"""By what a loop says of a step: what to change in a module."""


def hints_of(loop: LoopStatus | None) -> tuple[str, ...]:
    """Say in Lightning's terms what to change, where a loop declined a tier in those of a step of one's own."""
    declined = [one.why for one in loop.tiers if one.state == "declined"] if loop is not None else []
    return tuple(hint for cause, hint in _REMEDIES.items() if any(cause in why for why in declined))


@dataclasses.dataclass
class Stage:
    """What one call of the Trainer (``fit``, ``validate``, ``test``, ``predict``) did, as far as it has come.

    Args:
        name: of the call.
        given: by what the user compiled the module, or parts of it: ``torch``, ``hotloop``, or nothing.
        why: why no loop owns the step, or nothing is compiled.
        notes: what else there is to know.
        hints: what to change.
        ended: how it ended, where that was not in order.
        seen: status of loop and model, and the record, when what they tell of was taken off.
    """

    name: str
    given: str = ""
    why: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)
    ended: str = ""
    seen: Seen = (None, None, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerStatus:
    """The status of a model in a Trainer.

    Args:
        asked: what ``run=`` asked for.
        owned: whether a `hotloop.Loop` owns the training step; else the model is at most compiled in place.
        stage: the call of the Trainer that this tells of: ``fit``, where there was one; empty before any.
        given: whether the user compiled the module, or parts of it, which is taken as it is.
        why: why the step is not owned, a whole step not captured, or nothing compiled; empty where all is as asked.
        notes: what else there is to know.
        hints: what to change.
        ended: how the call ended, where that was not in order.
        loop: the loop's status, where there is one.
        model: the status of the compiled model.
        after: of ``validate``, ``test`` or ``predict`` after the fit, the last one.
    """

    asked: str
    owned: bool
    stage: str = ""
    given: bool = False
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    ended: str = ""
    loop: LoopStatus | None = None
    model: Status | None = None
    after: TrainerStatus | None = None

    @property
    def running(self) -> str:
        """What is in force, or was when the call ended: a tier, a preset, ``as-given`` or ``eager``."""
        if not self.stage:
            return ""
        if self.loop is not None:
            return self.loop.tier
        parts = self.model.components.values() if self.model is not None else ()
        presets = [one.running for one in parts if one.running != "none"]
        return presets[0] if presets else "as-given" if self.given else "eager"

    def to_dict(self) -> dict[str, Any]:
        """Give the status as plain JSON data."""
        return {
            "asked": self.asked,
            "running": self.running,
            "owned": self.owned,
            "stage": self.stage,
            "given": self.given,
            "why": list(self.why),
            "notes": list(self.notes),
            "hints": list(self.hints),
            "ended": self.ended,
            "loop": self.loop.to_dict() if self.loop is not None else None,
            "model": self.model.to_dict() if self.model is not None else None,
            "after": self.after.to_dict() if self.after is not None else None,
        }

    def __str__(self) -> str:
        ended = f" (ended by {self.ended})" if self.ended else ""
        doing = f"{self.stage}{ended}: {self.running}" if self.stage else "nothing has run yet in this process"
        parts = [f"hotloop in Lightning's Trainer (asked for: {self.asked}), {doing}"]
        parts += [str(one) for one in (self.loop, self.model) if one is not None]
        parts += [f"the step is the Trainer's own: {one}" for one in self.why]
        parts += [f"note: {one}" for one in self.notes]
        parts += [f"hint: {one}" for one in self.hints]
        parts += [str(self.after)] if self.after is not None else []
        return "\n".join(parts)
