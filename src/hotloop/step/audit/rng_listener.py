"""Notes which random streams a step draws from while it runs."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from hotloop._torch.dispatch import observing
from hotloop._torch.random_state import PYTHON
from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.state.rng_usage import FROM_PYTHON, drawn_by, is_pythons

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.step.state.rng_usage import RngUsage


@contextlib.contextmanager
def draws_noted(drawn: RngUsage) -> Iterator[None]:
    """Note which random streams the block draws from, once another thread was seen to draw.

    Without another thread that draws, listening would only cost time.
    """
    if not drawn.listens:
        yield
        return
    look = _Look()
    with look.listening():
        yield
    drawn.note(look.names if look.complete else None)


class _Look:
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
