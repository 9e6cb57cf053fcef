"""One call of a component: its target and arguments, and how eager answers where torch raised instead of compiling."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.dispatch import place_of
from hotloop._torch.module import class_forward, eager_call, get_entry, module_of
from hotloop.compiling.fallback.causes import chain_of, failure_of
from hotloop.compiling.observe import Call
from hotloop.errors import CompileFailedError

if TYPE_CHECKING:
    from hotloop.compiling.apply.roots import Root


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class TargetCall(Call):
    """A call of a target (a module, method or function) in one mode; ``root`` runs the target as compiled code."""

    root: Root
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run_eager(self) -> Any:
        """Run the target eagerly, and return its result."""
        return eager_call(self.target, *self.args, **self.kwargs)

    def ran_graph(self) -> bool:
        """Return whether a graph has run in the call: of this component, or perhaps of one inside of it."""
        module = module_of(self.target)
        inside = () if module is None else (part for part in module.modules() if part is not module)
        return self.reached_graph() or any(get_entry(part) is not None for part in inside)

    def raise_as_eager(self) -> None:
        """Run the target eagerly for its exception alone; without one, restore random states and buffers.

        Where eager raises, random states and buffers are as eager leaves them, unless compiled code had run a part of
        the call before: then eager has run that part for the second time.
        """
        module = module_of(self.target)
        buffers = [] if module is None else list(module.buffers())
        before = [buffer.detach().clone() for buffer in buffers]
        random = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        undo, partly_ran = True, self.reached_graph()
        try:
            self.run_eager()
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

    def strict_error(self, error: Exception) -> CompileFailedError:
        """Return the error to raise under ``strict``: the backend's own where it failed, else one for tracing."""
        for link in chain_of(error):
            if isinstance(link, CompileFailedError):
                return link
        failure = failure_of(error, None)
        raised = CompileFailedError(
            f"component {self.tally.component!r}: tracing failed: {failure.reason}. {failure.hint}"
        )
        raised.__cause__ = error
        return raised

    def stays_eager(self, error: Exception) -> ev.FrameEager:
        """Return why the target stays eager: torch's own event, which knows the user's line, else the exception."""
        if noted := self.forget_failures():
            return noted[0]
        failure = failure_of(error, None)
        file, line = (failure.file, failure.line) if failure.file else place_of(error) or (None, None)
        return ev.FrameEager(
            component=self.tally.component,
            function=type(self.target).__name__,
            stage="trace",
            file=file,
            line=line,
            reason=failure.reason,
            hint=failure.hint,
        )

    def retrace(self) -> None:
        """Make dynamo trace the functions anew that it gave up in the call, on the user's own error."""
        names = {event.function for event in self.forget_failures()}
        dynamo.forget_code(self.root.function.__code__)
        module = module_of(self.target)
        modules = () if module is None else module.modules()
        for kind in {type(module) for module in modules}:
            code = getattr(class_forward(kind), "__code__", None)
            if isinstance(code, types.CodeType) and code.co_name in names and not kind.__module__.startswith("torch."):
                dynamo.forget_code(code)
