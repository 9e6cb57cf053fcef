"""One call of a component: its target and arguments, and how eager answers where torch raised instead of compiling."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.dispatch import place_of
from hotloop._torch.module import class_forward, eager_call, module_of
from hotloop.compiling.control.before import Before
from hotloop.compiling.fallback.causes import chain_of, failure_of
from hotloop.compiling.observe import Call
from hotloop.errors import CompileFailedError, describe

if TYPE_CHECKING:
    from hotloop.compiling.apply.roots import Root


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class TargetCall(Call):
    """A call of a target (a module, method or function) in one mode; ``root`` runs the target as compiled code.

    ``before`` is what the call found. It may be needed only where Python runs between dynamo's graphs, on values that
    dynamo made: in any call of a root that is in parts, and in a call whose root is about to be traced.
    """

    root: Root
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before | None = None
    unkept: str = "a part had run before anything was compiled"
    """Why there is none, where it may be needed."""

    def note_found(self) -> None:
        """Note what the call found, before anything of it has run."""
        if self.root.sharded:
            self.unkept = "FSDP's hooks keep state of their own"
            return
        try:
            self.before = Before(module_of(self.target), (*self.args, *self.kwargs.values()))
        except RuntimeError as error:  # no memory for copies, say, though the call itself may fit
            self.unkept = describe(error)

    def compiles(self) -> None:
        """See `Call`."""
        frame: types.FrameType | None = sys._getframe()  # noqa: SLF001 - Python documents it
        name = self.root.function.__code__.co_name
        while frame is not None and frame.f_code is not _RUN:
            if frame.f_code.co_name == name:  # a part of the call has run, and this compile is of another part
                self.root.in_parts = True
                return
            frame = frame.f_back
        if self.before is None:
            self.note_found()

    def breaks(self) -> None:
        """See `Call`."""
        self.root.in_parts = True

    def run(self) -> Any:
        """Run the target as compiled code."""
        if self.root.in_parts:
            self.note_found()
        return self.root.compiled(self.target, *self.args, **self.kwargs)

    def lost(self) -> str:
        """Return why eager cannot repeat the call, since not all that it changed can be put back; empty if it can."""
        if self.before is None:
            return f"what it found was not kept ({self.unkept})"
        if module_of(self.target) is None:
            return "a part of a function has run, which may have changed anything"
        return self.before.lost()

    def run_eager(self) -> Any:
        """Run the target eagerly, and return its result."""
        return eager_call(self.target, *self.args, **self.kwargs)

    def raise_as_eager(self) -> None:
        """Run the target eagerly for its exception alone; without one, restore the module and the random states.

        Where eager raises, all is as eager leaves it. Where compiled code had run a part of the call before, and
        what that changed was not put back, eager has run that part for the second time.
        """
        before = Before(module_of(self.target), (*self.args, *self.kwargs.values()))
        undo, partly_ran = True, self.reached_graph() and self.before is None
        try:
            self.run_eager()
        except Exception:
            undo = partly_ran
            raise
        finally:
            if undo:
                before.restore()

    def strict_error(self, error: Exception) -> CompileFailedError:
        """Return the error to raise under ``strict``: the backend's own where it failed, else one for tracing."""
        for link in chain_of(error):
            if isinstance(link, CompileFailedError):
                return link
        failure = failure_of(error, None)
        raised = CompileFailedError(f"component {self.tally.label!r}: tracing failed: {failure.reason}. {failure.hint}")
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


_RUN = TargetCall.run.__code__
