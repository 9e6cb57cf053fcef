"""What to do with an exception that torch raised instead of compiling: under fullgraph and strict, and after the user's own."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.module import eager_call
from hotloop.errors import CompileFailedError
from hotloop.fallback.causes import Failure, failure_of

if TYPE_CHECKING:
    from hotloop.apply import Root
    from hotloop.control.component import Lane


def from_refusal(  # noqa: PLR0913 - a call has a target and arguments, a refusal its history
    lane: Lane, error: Exception, failed: int, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Dynamo refused a frame, under ``fullgraph`` or ``strict``. Give eager's result, or raise what the user should see.

    Under fullgraph there is one frame, and nothing of it has run. What eager raises too is the user's own.
    """
    strict, breaks = lane.config.strict, dynamo.is_graph_break(error)
    if strict or breaks:
        try:
            with _undone(target):
                eager_call(target, *args, **kwargs)
        except Exception:
            lane.tally.forget_failures(failed)
            raise
    if breaks and lane.config.fullgraph:
        raise error
    failure = failure_of(error, None)
    if strict:
        raise _strict_error(lane, error, failure)
    lane.go_eager(
        ev.FrameEager(
            component=lane.tally.component,
            function=type(target).__name__,
            stage="trace",
            file=failure.file,
            line=failure.line,
            reason=failure.reason,
            hint=failure.hint,
        )
    )
    return eager_call(target, *args, **kwargs)


def _strict_error(lane: Lane, error: Exception, failure: Failure) -> CompileFailedError:
    """Give the backend's own explanation where the backend failed, else one for tracing."""
    raised = next((link for link in _links(error) if isinstance(link, CompileFailedError)), None)
    if raised is None:
        raised = CompileFailedError(
            f"component {lane.tally.component!r}: tracing failed: {failure.reason}. {failure.hint}"
        )
        raised.__cause__ = error
    return raised


def _links(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        yield link
        link = getattr(link, "inner_exception", None) or link.__cause__


@contextlib.contextmanager
def _undone(target: Any) -> Iterator[None]:
    """Run a call for its exception alone: random state and buffers are as before it."""
    buffers = list(target.buffers()) if isinstance(target, torch.nn.Module) else []
    before = [buffer.detach().clone() for buffer in buffers]
    with torch.random.fork_rng():
        yield
    with torch.no_grad():
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)


def forget_functions(target: Any, root: Root, given_up: list[ev.FrameEager]) -> None:
    """Let dynamo trace the functions anew that it gave up on the user's own error."""
    dynamo.forget_code(root.function.__code__)
    names = {event.function for event in given_up}
    modules = target.modules() if isinstance(target, torch.nn.Module) else ()
    for kind in {type(module) for module in modules}:
        code = getattr(kind.forward, "__code__", None)
        if isinstance(code, types.CodeType) and code.co_name in names and not kind.__module__.startswith("torch."):
            dynamo.forget_code(code)
