"""What the rooms of `step` may know of the loop, and of one decorated step. Nothing below `loop` names `Loop`."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hotloop.interrupts import interruptible
from hotloop.measure.limits import compute_dtype

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

    import torch

    from hotloop.events import Event
    from hotloop.measure.limits import ComputeDtype
    from hotloop.step.compiled import Compiled
    from hotloop.step.engine import Engine
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.ranks.peers import Alone, Peers
    from hotloop.step.state.holdings import Holdings, Parts
    from hotloop.step.state.memory_limit import Room
    from hotloop.step.state.program import Program, WriteWatch
    from hotloop.step.tiers import Tier


class Verdict(NamedTuple):
    """What a room below has found of a tier: the name of a method of the policy, and its arguments."""

    name: str
    arguments: tuple[Any, ...]


class Reports(Protocol):
    """Where the rooms below `loop` say what happened. The loop writes it down and decides what follows."""

    def emit(self, event: Event) -> None:
        """Hand an event to the record, the watchers and the log."""

    def decided(self, reason: str, numbers: Mapping[str, Any], level: int = logging.INFO) -> None:
        """Write a decision down, with the numbers that it rests on, and log it."""

    def say_once(self, line: str, level: int = logging.INFO) -> None:
        """Log a line the first time that it is said."""

    def proof_took(self, seconds: float, copied_bytes: int = 0) -> None:
        """Add to what proofs have cost: seconds, and the bytes that one proof step copied."""

    def gave_up(self, tier: str, why: str) -> None:
        """Note that the policy gave a tier up before it was proven."""

    vetoes: dict[str, Obstacle]

    def timed_beside(self, tier: Tier, run: Callable[[], Any], call: Hashable = None) -> Any:
        """Run the reference of a proof, and count its time as a step of the tier that it runs in."""

    def seconds_of(self, tier: str) -> float | None:
        """Return the typical seconds of a step in a tier; None where none was timed."""

    def take(self) -> Sequence[Verdict]:
        """Return the verdicts on tiers since the last time: the policy is told them after the step."""

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what a tier that is being proven saves against another: seconds a step, over all calls of the loop."""

    def declined_kinds(self) -> list[str]:
        """List why kinds of calls are not captured, each reason once."""

    def proven(self, step: DecoratedStep, tier: Tier, *, worst: str, copied_bytes: int, on_host: bool) -> None:
        """Report that a tier agreed with its reference in enough steps."""

    def kind_declined(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle, *, every: bool) -> None:
        """Report a kind of call that cannot be captured; ``every`` kind that comes back cannot."""

    def left(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report a tier that is left for good."""

    def failed(self, step: DecoratedStep, tier: Tier, obstacle: Obstacle) -> None:
        """Report that the code of a tier failed or was wrong: from the next step on another tier runs."""


@dataclasses.dataclass
class Progress:
    """What the run has come to so far: the part of the context that changes."""

    tier: Tier
    """The tier that steps run in, or are on the way to."""
    may_capture: bool
    """Whether steps may be captured: there is an engine, and the policy may choose or was asked for a graph."""
    steps: int = 0
    """Steps done, those before a checkpoint included."""
    calls: int = 0
    """Calls of all steps in a tier, or on the way to one."""
    in_trial: bool = False
    """Whether the coming step is a turn of a trial, which is there for its time."""
    preparing: bool = False
    """Whether the policy has a tier on its way to its first proven step."""
    audits: int = 0
    draws_random: bool = False
    """Whether an audited step drew random numbers on the device."""
    matrix_dtypes: set[torch.dtype] = dataclasses.field(default_factory=set)
    """Floating dtypes that audits saw matrix products and convolutions compute in."""


@dataclasses.dataclass(frozen=True)
class Context:
    """What collaborators of one loop share.

    Args:
        holdings: everything that a step may change.
        parts: the parameters and modules among the holdings.
        device: where the step runs.
        engine: records steps; None where nothing can be captured.
        compiled: what is compiled of the models, and what is in force of it.
        base_tier: the tier of the models as the user gave them: ``eager`` or ``as-given``.
        peers: the processes of the run.
        writes: tells whether an optimizer has begun to write in the step that runs.
        progress: steps done, the tier in force.
        reports: where events, decisions, lines and verdicts go.
        room: the device memory that proofs may take.
        layout: what the user said of the layout of convolutions, one of `tiers.LAYOUTS`.
        total_steps: how many steps the run takes, if the user said so.
        runs: how many runs use what is compiled in this one, if the user said so.
        workload: ``module:function`` that makes the program anew, for a background compile.
    """

    holdings: Holdings
    parts: Parts
    device: torch.device
    engine: Engine | None
    compiled: Compiled
    base_tier: Tier
    peers: Alone | Peers
    writes: WriteWatch
    progress: Progress
    reports: Reports
    room: Room
    layout: str = "auto"
    total_steps: int | None = None
    runs: float | None = None
    workload: str | None = None

    def eager(self) -> contextlib.AbstractContextManager[None]:
        """Run the models as they were given while the block runs."""
        return self.compiled.aside()

    def compute_dtype(self) -> ComputeDtype:
        """Return the narrowest dtype that matrix products were seen in: it sets how much rounding is honest."""
        return compute_dtype(self.progress.matrix_dtypes, self.device)


class DecoratedStep:
    """One function under ``@loop.step``, as its audits, proofs and rescue see it.

    Args:
        program: its function, and what that changes.
        argument: turns the path of an argument into a name for messages.

    Attributes:
        doing: what the last call was: ``run``, ``survey``, ``proof``, ``capture``, ``sentinel`` or ``undone``.
        ran: the name of the tier that the last call ran in.
        call: shapes and dtypes of the last call's tensors; None where it was not looked at, as in eager.
        not_repeatable: why the step's Python must run exactly once a call, as an audit or a proof found.
        recounted: buffers that a forward wrote and a checkpoint's recomputation once more, as audits saw.
    """

    def __init__(self, context: Context, program: Program, argument: Callable[[str], str]) -> None:
        self.context, self.program, self.argument = context, program, argument
        self.name = getattr(program.step, "__name__", type(program.step).__name__)
        self.doing, self.ran = "run", context.base_tier.name
        self.call: Hashable = None
        self.not_repeatable: Obstacle | None = None
        self.recounted: set[str] = set()

    def note_not_repeatable(self, obstacles: Iterable[Obstacle]) -> None:
        """Keep the first obstacle that forbids a second run of the step's Python; without one, keep what is known."""
        self.not_repeatable = next((obstacle for obstacle in obstacles if obstacle.not_repeatable), self.not_repeatable)

    def eagerly(self, run: Callable[[], Any]) -> Any:
        """Run the step with the models as they were given."""
        self.ran = self.context.base_tier.name
        with self.context.eager():
            return interruptible(run)
