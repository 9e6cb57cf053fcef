"""What hears a step past its operations: the interface for audits, and two that hear one thing each."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hotloop._torch.dispatch import observing
from hotloop._torch.own_compiles import OwnCompiles
from hotloop._torch.random_state import PYTHON
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.audit.findings import AuditFindings
from hotloop.step.state.rng_usage import FROM_PYTHON, drawn_by, is_pythons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.state.rng_usage import RngUsage


class Listener:
    """Hears what a step does past its operations; this one hears nothing."""

    def __init__(self) -> None:
        self.seen = AuditFindings()
        """What the look that it goes with has seen so far: what a step did that raises is known, too."""
        self.own_compiles = OwnCompiles()
        """The functions that the step calls compiled, where calls are heard."""
        self.checks = "keep"
        """Which checks of libraries a recording of the step leaves out, as `Loop` takes it."""
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


@contextlib.contextmanager
def draws_noted(drawn: RngUsage) -> Iterator[None]:
    """Note which random streams the block draws from, once another thread was seen to draw.

    Without another thread that draws, listening would only cost time.
    """
    if not drawn.listens:
        yield
        return
    draws = _Draws()
    with draws.listening():
        yield
    drawn.note(draws.names if draws.complete else None)


class _Draws:
    """What one thread draws from in a block."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._calls = CallMonitor(FROM_PYTHON, self._called)

    @property
    def complete(self) -> bool:
        return self._calls.complete

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with observing(self._operation), self._calls.heard():
            yield

    def _called(self, _frame: Any, _name: str, owner: Any) -> None:
        if is_pythons(owner):
            self.names.add(PYTHON)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        self.names |= drawn_by(operation, args, kwargs, result)
        return result
