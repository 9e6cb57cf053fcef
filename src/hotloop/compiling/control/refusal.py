"""What to do with an exception that torch raised instead of compiling: fullgraph's, strict's, or the user's own."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.module import class_forward, eager_call, module_of
from hotloop.compiling.fallback.causes import chain_of, failure_of
from hotloop.errors import CompileFailedError

if TYPE_CHECKING:
    from hotloop.compiling.apply import Root


def frame_eager(component: str, error: Exception, target: Any) -> ev.FrameEager:
    """Return the event of a target that stays eager, as far as the exception explains it."""
    failure = failure_of(error, None)
    return ev.FrameEager(
        component=component,
        function=type(target).__name__,
        stage="trace",
        file=failure.file,
        line=failure.line,
        reason=failure.reason,
        hint=failure.hint,
    )


def strict_error(component: str, error: Exception) -> CompileFailedError:
    """Return the error to raise under ``strict``: the backend's own where the backend failed, else one for tracing."""
    for link in chain_of(error):
        if isinstance(link, CompileFailedError):
            return link
    failure = failure_of(error, None)
    raised = CompileFailedError(f"component {component!r}: tracing failed: {failure.reason}. {failure.hint}")
    raised.__cause__ = error
    return raised


def raise_as_eager(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, partly_ran: bool) -> None:
    """Run a call eagerly for its exception alone; without one, restore random states and buffers.

    Where eager raises, random states and buffers are as eager leaves them, unless compiled code had run a part of the
    call before (``partly_ran``): then eager has run that part for the second time.
    """
    module = module_of(target)
    buffers = [] if module is None else list(module.buffers())
    before = [buffer.detach().clone() for buffer in buffers]
    random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    undo = True
    try:
        eager_call(target, *args, **kwargs)
    except Exception:
        undo = partly_ran
        raise
    finally:
        if undo:
            torch.set_rng_state(random[0])
            torch.cuda.set_rng_state_all(random[1])
            with torch.no_grad():
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)


def forget_functions(target: Any, root: Root, given_up: list[ev.FrameEager]) -> None:
    """Make dynamo trace the functions anew that it gave up on the user's own error."""
    dynamo.forget_code(root.function.__code__)
    names = {event.function for event in given_up}
    module = module_of(target)
    modules = () if module is None else module.modules()
    for kind in {type(module) for module in modules}:
        code = getattr(class_forward(kind), "__code__", None)
        if isinstance(code, types.CodeType) and code.co_name in names and not kind.__module__.startswith("torch."):
            dynamo.forget_code(code)
