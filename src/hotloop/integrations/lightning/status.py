"""The status of the callback: what was asked for, what runs, and why not more, for people and for code."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from hotloop.shown import Shown

if TYPE_CHECKING:
    from hotloop.compiling.control import Status
    from hotloop.record import RunRecord
    from hotloop.step import LoopStatus


class Snapshot(NamedTuple):
    """The status of loop and model, and the record, as they are now or were when a call of the Trainer ended."""

    loop: LoopStatus | None = None
    model: Status | None = None
    record: RunRecord | None = None

    def hints(self) -> list[str]:
        """List in Lightning's terms what to change so that the loop need not decline a tier."""
        declined = [tier.why for tier in self.loop.tiers if tier.state == "declined"] if self.loop is not None else []
        remedies = {
            "closure variable trainer[": "a captured step cannot follow what changes of the Trainer at every step: "
            "have on_train_batch_start write it into a buffer of the module's (self.scale.fill_(...)), and "
            "training_step read that",
            "returns a Python number": "what training_step logs is returned by the step as well: log a number in "
            "on_train_batch_end, or a tensor",
        }
        return [hint for cause, hint in remedies.items() if any(cause in why for why in declined)]


@dataclasses.dataclass
class Stage:
    """A call of the Trainer (``fit``, ``validate``, ``test``, ``predict``) and what it did so far.

    Args:
        name: of the call.
        given: by what the user compiled the module, or parts of it: ``torch``, ``hotloop``, or nothing.
        why: why no loop owns the step, or nothing is compiled.
        notes: what else there is to know.
        hints: what to change.
        ended: the exception that ended it, if any.
        snapshot: status and record when the compile or the loop was taken off.
    """

    name: str
    given: str = ""
    why: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)
    ended: str = ""
    snapshot: Snapshot = dataclasses.field(default_factory=Snapshot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerStatus(Shown):
    """The status of a model in a Trainer.

    Args:
        asked: what ``run=`` asked for.
        owned: whether a `hotloop.Loop` owns the training step; else the model is at most compiled in place.
        stage: the call of the Trainer that this describes: ``fit``, if there was one; empty before any.
        given: whether the user compiled the module, or parts of it, which is taken as it is.
        why: why the step is not owned, a whole step not captured, or nothing compiled; empty where all is as asked.
        notes: what else there is to know.
        hints: what to change.
        ended: the exception that ended the call, if any.
        loop: the loop's status, if there is a loop.
        model: the status of the compiled model.
        after: the status of the last ``validate``, ``test`` or ``predict`` after the fit.
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
        default = "as-given" if self.given else "eager"
        return next((part.running for part in parts if part.running != "none"), default)

    def to_dict(self) -> dict[str, Any]:
        """Return the status as plain JSON data."""
        plain: dict[str, Any] = {"asked": self.asked, "running": self.running}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            plain[field.name] = list(value) if isinstance(value, tuple) else value
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
