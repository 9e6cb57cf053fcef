"""What hears a step past its operations: the interface for audits, and two that hear one thing each."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hotloop._torch.dispatch import observing
from hotloop._torch.own_compiles import OwnCompiles
from hotloop._torch.random_state import PYTHON
from hotloop.errors import describe
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.audit.findings import AuditFindings
from hotloop.step.obstacle import Obstacle
from hotloop.step.state.rng_usage import FROM_PYTHON, drawn_by, is_pythons

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.state.rng_usage import RngUsage


FAILED = "hotloop failed as it looked at the step"
REPORT_IT = "the step trains on without this tier; please report this line to hotloop"
_T = TypeVar("_T")


def described(error: BaseException) -> str:
    """Describe an exception of ours, with the line of ours that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    at = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""
    return f"{describe(error)}{at}"


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

    def ours(self, look: Callable[..., _T], *args: Any, instead: Any = None) -> _T | Any:
        """Call what is ours amid the user's step. Where it fails, the step goes on unobserved, and is declined."""
        if self.seen.stopped:
            return instead
        try:
            return look(*args)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is none of the user's
            # Its Python has to run once: nobody saw what the step does.
            self.seen.failed = Obstacle(f"{FAILED}: {described(error)}", REPORT_IT, not_repeatable=True)
            self.seen.obstacles, self.seen.stopped = [self.seen.failed], True
            with contextlib.suppress(Exception):  # the step is declined as it is
                self.stop()
            return instead

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
        self._calls = CallMonitor(frozenset(), lambda *_: None, functools.partial(self.ours, self.own_compiles.began))

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
        self._failed = False
        self._calls = CallMonitor(FROM_PYTHON, self._called)

    @property
    def complete(self) -> bool:
        return self._calls.complete and not self._failed

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        with observing(self._operation), self._calls.heard():
            yield

    def _called(self, _frame: Any, _name: str, owner: Any) -> None:
        if is_pythons(owner):
            self.names.add(PYTHON)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        try:
            self.names |= drawn_by(operation, args, kwargs, result)
        except Exception:  # noqa: BLE001 - ours, amid the user's step
            self._failed = True
        return result
