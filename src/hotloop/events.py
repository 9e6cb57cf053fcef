"""Everything that can be observed, as frozen dataclasses; a run record holds their dictionaries."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, ClassVar, Literal

Stage = Literal["trace", "lower", "compile", "run"]
"""Where a failure arose: dynamo's tracing, lowering to kernels, compiling those kernels, or running them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that was observed. ``time`` is seconds since the epoch; ``component`` is None outside of components."""

    kind: ClassVar[str] = "event"
    component: str | None = None
    time: float = dataclasses.field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as plain JSON data, its class under ``kind``."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @property
    def location(self) -> str:
        """``file:line`` of the user's code, or an empty string if it is unknown."""
        file = getattr(self, "file", None)
        return f"{file}:{getattr(self, 'line', 0)}" if file else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compiled(Event):
    """A graph was compiled, in ``seconds`` from trace to kernels; cache counts are of Inductor's graphs."""

    kind: ClassVar[str] = "compiled"
    frame: str
    function: str
    file: str | None
    line: int | None
    phase: Literal["forward", "backward"] = "forward"
    seconds: float = 0.0
    ops: int | None = None
    guards: int | None = None
    cache_hits: int = 0
    cache_misses: int = 0
    cudagraphs_skipped: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompiled(Event):
    """Compiled code no longer fitted; ``reason`` is torch's failed guard, ``nth`` counts from 1.

    The place is the user's line that the guard comes from, if torch names it, else the start of the function.
    ``frame`` is that of the `Compiled` event which follows.
    """

    kind: ClassVar[str] = "recompiled"
    function: str
    file: str | None
    line: int | None
    reason: str
    nth: int
    frame: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphBreak(Event):
    """Tracing had to stop and continue in a new graph; ``source`` is the user's line, ``hint`` how to fix it.

    If the line is an installed package's, ``by_file``, ``by_line`` and ``by_source`` are the program's own line that
    led there.
    """

    kind: ClassVar[str] = "graph_break"
    file: str | None
    line: int | None
    source: str
    reason: str
    hint: str
    by_file: str | None = None
    by_line: int | None = None
    by_source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecompileLimit(Event):
    """A code object was compiled as often as torch allows: new inputs run eager from here on."""

    kind: ClassVar[str] = "recompile_limit"
    function: str
    file: str | None
    line: int | None
    reason: str
    whole: bool = False
    """Whether the limit is on the component's own entry, not on a function inside it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameEager(Event):
    """A function could not be traced and stays eager; what it calls may still be compiled."""

    kind: ClassVar[str] = "frame_eager"
    function: str
    stage: Stage
    file: str | None
    line: int | None
    reason: str
    hint: str
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fallback(Event):
    """A graph went one rung down its ladder; or a whole component did, from a step boundary on."""

    kind: ClassVar[str] = "fallback"
    scope: Literal["graph", "component"]
    from_preset: str
    to_preset: str
    stage: Stage
    reason: str
    file: str | None = None
    line: int | None = None
    hint: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unavailable(Event):
    """This machine cannot run a preset; known before the first step."""

    kind: ClassVar[str] = "unavailable"
    preset: str
    missing: str
    running: str

    @property
    def hint(self) -> str:
        """What to do about it."""
        if "is missing in this torch" in self.missing:
            return "install a torch that hotloop was tested on, or a hotloop that was tested on this one"
        return "install what is missing, or name a preset that does without it (hotloop presets lists them)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoEffect(Event):
    """A compile was asked for, and has no effect; ``partly``: a part of it has.

    ``problem`` is the kind of the problem in rule ``no_effect`` of `hotloop.diagnose`, whose change is the ``hint``.
    """

    kind: ClassVar[str] = "no_effect"
    reason: str
    hint: str
    problem: str = "no_graph"
    file: str | None = None
    line: int | None = None
    partly: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """Compiled code failed while it ran, where eager does not."""

    kind: ClassVar[str] = "run_failed"
    phase: Literal["forward", "backward"]
    preset: str
    reason: str
    file: str | None = None
    line: int | None = None

    @property
    def remedy(self) -> str:
        """What to do. The step cannot be repeated; below the preset that failed there may be another compiled one."""
        lower = "preset none, which is eager" if self.preset == "aot_eager" else "a lower preset (aot_eager, none)"
        return f"load the last checkpoint and use {lower}; a step that a hotloop.Loop owns is undone, and runs eager"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Captured(Event):
    """A whole step was recorded; ``outside`` names the optimizers that run between its segments."""

    kind: ClassVar[str] = "captured"
    step: int
    function: str
    seconds: float
    operations: int
    outside: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureDropped(Event):
    """A recorded step no longer fitted the program and is recorded again. ``reason`` names what changed."""

    kind: ClassVar[str] = "capture_dropped"
    step: int
    function: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsStale(Event):
    """A change was noticed late: the steps from ``first_step`` to ``last_step`` may have used an old value.

    ``operation`` is the first one that differed, with the user's line that runs it.
    """

    kind: ClassVar[str] = "steps_stale"
    step: int
    function: str
    first_step: int
    last_step: int
    operation: str
    file: str | None
    line: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierProven(Event):
    """A tier agreed with its reference on ``steps`` real steps; ``worst`` is the tensor nearest to its limit."""

    kind: ClassVar[str] = "tier_proven"
    step: int
    function: str
    tier: str
    steps: int
    worst: str
    seconds: float
    copied_bytes: int
    on_host: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierDeclined(Event):
    """A tier cannot run, or did not agree with its reference; file and line are the user's, if a line is the cause."""

    kind: ClassVar[str] = "tier_declined"
    step: int
    function: str
    tier: str
    reason: str
    hint: str
    file: str | None = None
    line: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierChanged(Event):
    """From ``step`` on, steps run in another tier."""

    kind: ClassVar[str] = "tier_changed"
    step: int
    from_tier: str
    to_tier: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentinelDisagreed(Event):
    """A step of the tier in force did not agree with the same step in eager: ``tensor`` is furthest past its limit.

    The tier is proven again then. ``certain`` says that it is further off than rounding ever is.
    """

    kind: ClassVar[str] = "sentinel_disagreed"
    step: int
    function: str
    tier: str
    tensor: str
    measure: str
    value: float | None
    limit: float | None
    reason: str
    certain: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepUndone(Event):
    """A step failed in its tier before a parameter was written: it was undone and run eagerly."""

    kind: ClassVar[str] = "step_undone"
    step: int
    function: str
    tier: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostSync(Event):
    """Python waited for the device at one line of a step: ``times`` per step, for ``seconds`` per step if known."""

    kind: ClassVar[str] = "host_sync"
    file: str | None
    line: int | None
    source: str
    reason: str
    times: float = 1.0
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOutside(Event):
    """Activation checkpointing wrapped compiled code from outside: its recomputation is not compiled with it."""

    kind: ClassVar[str] = "checkpoint_outside"
    function: str
    file: str | None = None
    line: int | None = None
    source: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingSwitched(Event):
    """A framework switched TF32 on, since it was asked to compile: ``by`` is its name."""

    kind: ClassVar[str] = "setting_switched"
    setting: str
    after: str
    by: str


_KINDS: dict[str, type[Event]] = {cls.kind: cls for cls in Event.__subclasses__()}


def from_dict(data: dict[str, Any]) -> Event:
    """Rebuild an event from `Event.to_dict`'s dictionary.

    Raises:
        ValueError: the kind is not one of this version's, or a field does not belong to it.
    """
    fields = dict(data)
    kind = fields.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ValueError(f"unknown event kind {kind!r}: expected one of {', '.join(_KINDS)}")
    try:
        return cls(**fields)
    except TypeError as error:
        raise ValueError(f"event of kind {kind!r} does not fit: {error}") from error
