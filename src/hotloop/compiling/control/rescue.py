"""What to do with an exception that torch raised instead of compiling: fullgraph's, strict's, or the user's own."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.module import class_forward, eager_call, module_of
from hotloop.compiling.fallback.causes import Failure, failure_of
from hotloop.errors import CompileFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.compiling.apply import Root
    from hotloop.compiling.control.component import Lane


def from_refusal(  # noqa: PLR0913, PLR0917 - a call has a target and arguments, a refusal its history
    lane: Lane,
    root: Root,
    error: Exception,
    history: tuple[int, int],
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Dynamo refused a frame. Give eager's result, or raise what the user should see.

    What eager raises too is the user's own, and the component may be compiled another time. ``history`` is how many
    failures were known and graphs executed when the call began.
    """
    if dynamo.is_other_tracer(error):  # for the time of its trace only
        return eager_call(target, *args, **kwargs)
    failed, executed = history
    config, breaks = lane.config, dynamo.is_graph_break(error)
    raises = config.strict or (config.fullgraph and breaks)
    result = None
    try:
        if raises:
            _ask_eager(target, args, kwargs, again=lane.tally.executed != executed)
        else:
            result = eager_call(target, *args, **kwargs)
    except Exception:
        lane.users_own(failed, target, root)
        raise
    if config.fullgraph and breaks:
        raise error
    if config.strict:
        raise _strict_error(lane, error, failure_of(error, None))
    if dynamo.is_limit(error):  # what was compiled before goes on running; the event is in the account already
        lane.ran_eager(target, root)
    else:
        lane.go_eager(_stays_eager(lane, error, target, failed))
    return result


def _stays_eager(lane: Lane, error: Exception, target: Any, failed: int) -> ev.FrameEager:
    """Give torch's own account of what failed, which knows the user's line, else what the exception tells."""
    if noted := lane.tally.forget_failures(failed):
        return noted[0]
    failure = failure_of(error, None)
    return ev.FrameEager(
        component=lane.tally.component,
        function=type(target).__name__,
        stage="trace",
        file=failure.file,
        line=failure.line,
        reason=failure.reason,
        hint=failure.hint,
    )


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


def _ask_eager(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, again: bool) -> None:
    """Run a call for its exception alone: where it raises none, random state and buffers are as before it.

    Where it raises, they are as eager leaves them. ``again``: compiled code has run that part of the call already.
    """
    module = module_of(target)
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.detach().clone() for buffer in buffers]
    random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    undo = True
    try:
        eager_call(target, *args, **kwargs)
    except Exception:
        undo = again
        raise
    finally:
        if undo:
            torch.set_rng_state(random[0])
            torch.cuda.set_rng_state_all(random[1])
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def forget_functions(target: Any, root: Root, given_up: list[ev.FrameEager]) -> None:
    """Let dynamo trace the functions anew that it gave up on the user's own error."""
    dynamo.forget_code(root.function.__code__)
    names = {event.function for event in given_up}
    module = module_of(target)
    modules = () if module is None else module.modules()
    for kind in {type(module) for module in modules}:
        code = getattr(class_forward(kind), "__code__", None)
        if isinstance(code, types.CodeType) and code.co_name in names and not kind.__module__.startswith("torch."):
            dynamo.forget_code(code)
