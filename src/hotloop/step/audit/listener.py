"""The interface of what hears a step past its operations while it is audited."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hotloop._torch.own_compiles import OwnCompiles
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.audit.findings import AuditFindings

if TYPE_CHECKING:
    from collections.abc import Callable


class Listener:
    """Hears what a step does past its operations; this one hears nothing."""

    def __init__(self) -> None:
        self.seen = AuditFindings()
        """What the look that it goes with has seen so far: what a step did that raises is known, too."""
        self.own_compiles = OwnCompiles()
        """The functions that the step calls compiled, where calls are heard."""
        self.skips_checks = False
        """Whether a recording of the step leaves out checks of libraries (`hotloop._torch.checks`)."""
        self.ends: Callable[[AuditFindings], bool] = lambda _: False
        """Asked after each operation, with what was seen so far, whether the rest of the step runs unobserved."""

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Listen while the block runs."""
        return contextlib.nullcontext()

    def hear(self, on: bool) -> None:
        """Listen to what Python does, or not, while an operation is looked at: that is no step's doing."""

    def stop(self) -> None:
        """Listen no more, though the block runs on."""

    def operation(self, kwargs: dict[str, Any]) -> None:
        """Hear of an operation that comes, and of its named arguments."""

    def has_run(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Hear of an operation that has run, and of what it gave."""


class CompilesHeard(Listener):
    """Hears the functions that a step calls compiled, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = CallMonitor(frozenset(), lambda *_: None, self.own_compiles.began)

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Listen while the block runs."""
        self.own_compiles.begin()
        return self._calls.heard()

    def hear(self, on: bool) -> None:
        """Listen to calls, or leave them unheard for a while."""
        self._calls.hear(on)
