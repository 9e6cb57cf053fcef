"""One call of a component: its target and arguments, and how eager answers where torch raised instead of compiling."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.dispatch import place_of
from hotloop._torch.foreach import copies
from hotloop._torch.module import class_forward, eager_call, get_entry, module_of
from hotloop._torch.places import places_of, put_back
from hotloop._torch.random_state import RandomState
from hotloop.compiling.fallback.causes import chain_of, failure_of
from hotloop.compiling.observe import Call
from hotloop.errors import CompileFailedError
from hotloop.interrupts import uninterrupted

if TYPE_CHECKING:
    from hotloop.compiling.apply.roots import Root

_CONTAINERS = (list, dict, set, collections.OrderedDict)


class Before:
    """What a module and the random streams held before a call: attributes, plain containers in them, buffers.

    Not held: parameters' values, what containers hold inside of others, and objects beside the module.
    """

    def __init__(self, module: torch.nn.Module | None) -> None:
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        on_gpu = on_gpu and not torch.cuda.is_current_stream_capturing()  # which forbids reading the streams
        self._random = RandomState([torch.device("cuda", at) for at in range(torch.cuda.device_count() * on_gpu)])
        self._parts = [] if module is None else [(part, dict(part.__dict__)) for part in module.modules()]
        contained = (value for _, held in self._parts for value in held.values() if type(value) in _CONTAINERS)
        self._containers = [(value, value.copy()) for value in contained]
        self._buffers = [] if module is None else [places_of(buffer) for buffer in module.buffers()]
        self._copies = copies(self._buffers)

    @classmethod
    def of(cls, module: torch.nn.Module | None) -> Before | None:
        """Note what a module holds; None where its buffers have no values yet, or there is no memory for copies."""
        if module is not None and any(torch.nn.parameter.is_lazy(buffer) for buffer in module.buffers()):
            return None
        try:
            return cls(module)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                return None  # the call itself may fit
            raise

    @uninterrupted
    def restore(self) -> None:
        """Put back what was held."""
        for part, held in self._parts:
            part.__dict__.clear()
            part.__dict__.update(held)
        for value, held in self._containers:
            value.clear()
            value.extend(held) if isinstance(value, list) else value.update(held)
        put_back(self._buffers, self._copies)
        self._random.restore()


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class TargetCall(Call):
    """A call of a target (a module, method or function) in one mode; ``root`` runs the target as compiled code.

    ``before`` is what an early call found, kept as long as no graph of the component has ever run.
    """

    root: Root
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    before: Before | None = None

    def may_fail_on_stand_in(self, error: Exception) -> bool:
        """Return whether the call may have raised since dynamo handed the program a value of another type than torch.

        No graph of it has run, and what its Python changed in the module can be put back.
        """
        return self.before is not None and isinstance(error, TypeError | AttributeError) and not self.ran_graph()

    def run_eager(self) -> Any:
        """Run the target eagerly, and return its result."""
        return eager_call(self.target, *self.args, **self.kwargs)

    def ran_graph(self) -> bool:
        """Return whether a graph has run in the call: of this component, or perhaps of one inside of it."""
        module = module_of(self.target)
        inside = () if module is None else (part for part in module.modules() if part is not module)
        return self.reached_graph() or any(get_entry(part) is not None for part in inside)

    def raise_as_eager(self) -> None:
        """Run the target eagerly for its exception alone; without one, restore the module and the random states.

        Where eager raises, all is as eager leaves it, unless compiled code had run a part of
        the call before: then eager has run that part for the second time.
        """
        before = Before(module_of(self.target))
        undo, partly_ran = True, self.reached_graph()
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
