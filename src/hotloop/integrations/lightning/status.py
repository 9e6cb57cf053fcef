"""The status of the callback: what was asked for, what runs, and why not more, for people and for code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from rich.text import Text

from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.compiling.control import Status
    from hotloop.step import LoopStatus

CHANGES = (
    "a captured step cannot follow what changes of the Trainer at every step: have on_train_batch_start write it into "
    "a buffer of the module's (self.scale.fill_(...)), and training_step read that"
)
NUMBERS = "what training_step logs is returned by the step as well: log a number in on_train_batch_end, or a tensor"


@dataclasses.dataclass(kw_only=True)
class TrainerStatus(Shown):
    """The status of a model in a Trainer, of one call of the Trainer.

    Args:
        asked: what ``run=`` asked for.
        stage: the call: ``fit``, ``validate``, ``test`` or ``predict``; empty before any.
        owned: whether a `hotloop.Loop` owns the training step; else the model is at most compiled in place.
        given: by what the user compiled the module or parts of it: ``torch``, ``hotloop``, or nothing.
        why: why the step is not owned; empty where all is as asked.
        notes: what else there is to know.
        hints: what to change.
        ended: the exception that ended the call, if any.
        loop: the loop's status, if there is a loop.
        model: the status of the compiled model.
        after: the status of the last ``validate``, ``test`` or ``predict`` after the fit.
    """

    asked: str
    stage: str = ""
    owned: bool = False
    given: str = ""
    why: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)
    ended: str = ""
    loop: LoopStatus | None = None
    model: Status | None = None
    after: TrainerStatus | None = None

    def now(self, loop: LoopStatus | None, model: Status | None) -> TrainerStatus:
        """Return a copy with what runs now, and what to change where the loop has declined a tier."""
        declined = " ".join(tier.why for tier in loop.tiers if tier.state == "declined") if loop is not None else ""
        causes = {"global_step, which changes": CHANGES, "returns a Python number": NUMBERS}
        hints = [hint for cause, hint in causes.items() if cause in declined and hint not in self.hints]
        return dataclasses.replace(
            self, owned=loop is not None, loop=loop, model=model, hints=[*self.hints, *hints], notes=[*self.notes]
        )

    @property
    def running(self) -> str:
        """What is in force, or was when the call ended: a tier, a preset, ``as-given`` or ``eager``."""
        if not self.stage:
            return ""
        if self.loop is not None:
            return self.loop.tier
        parts = self.model.components.values() if self.model is not None else ()
        default = "as-given" if self.given else "eager"
        return next((part.running for part in parts if part.running != "none"), default)

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        plain = {"running": self.running, **vars(self)}
        for name in ("loop", "model", "after"):
            plain[name] = plain[name].to_dict() if plain[name] is not None else None
        return plain

    def __rich__(self) -> Text:
        return Text(str(self))

    def __str__(self) -> str:
        ended = f" (ended by {self.ended})" if self.ended else ""
        doing = f"{self.stage}{ended}: {self.running}" if self.stage else "nothing has run yet in this process"
        lines = [f"hotloop in Lightning's Trainer (asked for: {self.asked}), {doing}"]
        lines += [str(status) for status in (self.loop, self.model) if status is not None]
        lines += [f"the step is the Trainer's own: {why}" for why in self.why]
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"hint: {hint}" for hint in self.hints]
        lines += [str(self.after)] if self.after is not None else []
        return "\n".join(lines)
