"""CUDA graphs without a GPU: compiled code runs eager kernels, and its outputs are overwritten as the trees would.

The rule is copied from ``torch/_inductor/cudagraph_trees.py``. ``docs/concepts/cudagraph-lifetime.md`` states it,
``docs/how-to/cudagraphs.md`` where the emulation differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import cudagraphs
from hotloop._torch.cudagraphs import GraphOutput, MemoryReference
from hotloop._torch.dispatch import name_of, observing, tensors_in, user_place
from hotloop._torch.settings import captures
from hotloop._torch.traced import TracedGraph, compile_traced
from hotloop.compiling.fallback.step_marks import steps
from hotloop.compiling.observe import active
from hotloop.errors import ConfigError, StaleOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import fx

    from hotloop.presets import Preset

_running: list[Emulation] = []


@dataclasses.dataclass(frozen=True)
class Overwritten:
    """An output that was still held when its memory was reused: by a call at ``file``, ``line``."""

    output: GraphOutput
    file: str | None
    line: int | None

    def __str__(self) -> str:
        by = f" by the call at {self.file}:{self.line}" if self.file else ""
        return f"{self.output}, overwritten{by}"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A graph that torch does not capture, so that its outputs are ordinary tensors; ``reason`` says why."""

    component: str
    kind: str
    reason: str
    file: str | None
    line: int | None

    def __str__(self) -> str:
        at = f" at {self.file}:{self.line}" if self.file else ""
        return f"{self.component or 'a compiled function'}, {self.kind}: {self.reason}{at}"


class _Tracked(MemoryReference):
    """An output, and a reference to its memory that does not keep it alive."""

    __slots__ = ("_dtype", "output")

    def __init__(self, output: GraphOutput, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.output, self._dtype = output, tensor.dtype

    def fill(self) -> None:
        """Overwrite the memory, so that reads which bypass torch's dispatcher go visibly wrong too."""
        dtype = self._dtype
        garbage: float | int | bool
        if dtype.is_floating_point or dtype.is_complex:
            garbage = float("nan")
        else:
            garbage = True if dtype == torch.bool else torch.iinfo(dtype).max
        with torch.no_grad():
            torch.empty(0, dtype=dtype).set_(self.storage()).fill_(garbage)


class _OfThread(threading.local):
    """The graphs of one thread: torch keeps a tree of graphs for each thread as well."""

    generation: int | None = None
    marked: int = 0
    forward_waits: bool = False

    def __init__(self) -> None:
        self.live: list[_Tracked] = []


class Emulation:
    """The object that `cudagraph_emulation` yields: the backend for plain ``torch.compile``, and its findings.

    ``overwritten`` lists each output that was held when its memory was reused, read or not; ``skipped`` the graphs that
    torch would not capture; ``unmarked`` the places where a new generation began without a marked step.
    """

    def __init__(self) -> None:
        self.overwritten: list[Overwritten] = []
        self.skipped: list[Skipped] = []
        self.unmarked: list[tuple[str, int] | None] = []
        self.runs = 0
        self._of_thread = _OfThread()
        self._stale: dict[int, _Tracked] = {}
        self._open = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Emulation:
        """Return itself: there is one memory, and Lightning Fabric copies the arguments of ``torch.compile``."""
        return self

    def backend(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile one graph of dynamo's, its backward included.

        It stands for ``mode="reduce-overhead"``: ``torch.compile(backend=emulation.backend)``.
        """
        return compile_traced(graph, inputs, lambda traced: _Graph(self, traced).run)

    def watching(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which reads are seen. The first thread is in it; each further thread needs its own."""
        return observing(self._operation)

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `hotloop._torch.cudagraphs.Trees`."""
        key = cudagraphs.storage_key(tensor)
        return any(live.output.storage == key and live.alive() for live in self._of_thread.live)

    def alive(self) -> Iterator[GraphOutput]:
        """See `hotloop._torch.cudagraphs.Trees`."""
        yield from (live.output for live in self._of_thread.live if live.alive())

    def forward_waits(self) -> bool:
        """See `hotloop._torch.cudagraphs.Trees`."""
        return self._of_thread.forward_waits

    def backward_ran(self) -> None:
        """See `hotloop._torch.cudagraphs.Trees`."""
        self._of_thread.forward_waits = False

    def renew_outputs(self) -> None:
        """See `hotloop._torch.cudagraphs.Trees`: here each run hands out new tensors."""

    def close(self) -> None:
        """Stop overwriting; code that was compiled here runs on, unwatched."""
        self._open = False
        self._stale.clear()

    def begin_run(self, place: tuple[str, int] | None) -> bool:
        """End the generation before a graph runs, where torch would; return False once the emulation is over."""
        if not self._open:
            return False
        mine, now = self._of_thread, cudagraphs.generation()
        self.runs += 1
        if mine.generation not in (None, now) and (cudagraphs.marked() or not mine.forward_waits):
            if cudagraphs.marked() == mine.marked:
                self.unmarked.append(place)
            self._overwrite(place)
        return True

    def ran(self, kind: str, made: list[tuple[GraphOutput, torch.Tensor]] | None) -> None:
        """Note that a graph ran; ``made`` are its outputs in its memory, None where torch does not capture it."""
        mine = self._of_thread
        if made is not None:
            mine.generation, mine.marked = cudagraphs.generation(), cudagraphs.marked()
            before = [live for live in mine.live if live.alive()]
            mine.live = before + [_Tracked(output, tensor) for output, tensor in made]
        if kind != "inference":
            mine.forward_waits = kind == "forward"

    def skip(self, skipped: Skipped) -> None:
        """Note once that a graph is not captured."""
        if skipped not in self.skipped:
            self.skipped.append(skipped)
            active.tally.cudagraphs_skipped[skipped.reason] += 1

    def check(self, tensors: Iterator[torch.Tensor], what: str) -> None:
        """Refuse tensors whose memory was overwritten.

        Raises:
            StaleOutputError: memory was overwritten; the message names the output, where it was made and is used.
        """
        if not self._stale:
            return
        for tensor in tensors:
            found = self._stale.get(cudagraphs.storage_key(tensor))
            if found is not None:
                place = user_place()
                at = f" at {place[0]}:{place[1]}" if place else ""
                raise StaleOutputError(
                    f"{what} reads{at} what a later call of compiled code has overwritten under CUDA graphs: "
                    f"{found.output}. Read it before that call, keep a copy (hotloop.own, or .clone()), or "
                    "make it again",
                    [found.output],
                )

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        looks_only = getattr(operation, "is_view", False) or operation is torch.ops.aten.detach.default
        if self._stale and not looks_only:
            self.check(tensors_in(*args, *kwargs.values()), name_of(operation))
        return operation(*args, **kwargs)

    def _overwrite(self, place: tuple[str, int] | None) -> None:
        """Overwrite the outputs of this thread's generation that are still held."""
        self._stale = {key: tracked for key, tracked in self._stale.items() if tracked.alive()}
        mine = self._of_thread
        for live in mine.live:
            if live.alive():
                live.fill()
                self._stale[live.output.storage] = live
                file, line = place or (None, None)
                self.overwritten.append(Overwritten(live.output, file, line))
        mine.live = []


class _Graph:
    """One graph: its outputs, except for inputs that it hands on, lie in the memory of the graphs."""

    def __init__(self, emulation: Emulation, traced: TracedGraph) -> None:
        self._emulation, self._traced = emulation, traced
        self._component = active.tally.component

    def run(self, args: list[Any]) -> Any:
        """Run the graph as torch calls it: with a list of inputs that it empties."""
        traced, emulation = self._traced, self._emulation
        if traced.kind != "backward":
            self._component = active.tally.component or self._component
        inputs = list(args)
        args.clear()
        real = not any(cudagraphs.is_fake(value) for value in inputs)
        watched = real and captures() and emulation.begin_run(user_place())
        captured = False
        if watched:
            emulation.check(tensors_in(inputs), f"the {traced.kind}{self._whose()}")
            captured = not self._writes_inputs(inputs)
        given = {cudagraphs.storage_key(value) for value in inputs if isinstance(value, torch.Tensor)}
        given |= traced.constants()
        outputs = traced.call(inputs)
        if watched:
            emulation.ran(traced.kind, self._made(outputs, given) if captured else None)
        return outputs

    def _made(self, outputs: Any, given: set[int]) -> list[tuple[GraphOutput, torch.Tensor]]:
        """Return the outputs in memory that no input has, one for each piece of memory."""
        made: dict[int, tuple[GraphOutput, torch.Tensor]] = {}
        for index, tensor in enumerate(outputs):
            key = cudagraphs.storage_key(tensor) if isinstance(tensor, torch.Tensor) else 0
            if not key or key in given or key in made or not tensor.untyped_storage().nbytes():
                continue
            name, place = self._traced.outputs[index]
            output = GraphOutput(
                name=name,
                index=index,
                kind=self._traced.kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                component=self._component,
                file=place[0] if place else None,
                line=place[1] if place else None,
                storage=key,
            )
            made[key] = output, tensor
        return list(made.values())

    def _writes_inputs(self, inputs: list[Any]) -> bool:
        """Return whether the graph writes into an input that is neither a parameter nor a buffer, nor a graph's own."""
        written = [index for index in self._traced.written if not self._emulation.holds(inputs[index])]
        if written:
            place = self._traced.written[written[0]]
            self._skip(f"it writes into an input ({self._traced.inputs[written[0]]})", place)
        return bool(written)

    def _skip(self, reason: str, place: tuple[str, int] | None) -> None:
        self._emulation.skip(Skipped(self._component, self._traced.kind, reason, *(place or (None, None))))

    def _whose(self) -> str:
        return f" of component {self._component!r}" if self._component else ""


def running() -> Emulation | None:
    """Return the emulation in force."""
    return _running[-1] if _running else None


def emulation_of(preset: Preset) -> Emulation | None:
    """Return the emulation in force where the preset has CUDA graphs, else None."""
    return _running[-1] if _running and preset.cudagraphs else None


@contextlib.contextmanager
def cudagraph_emulation() -> Iterator[Emulation]:
    """Make compiled code behave as CUDA graphs do while the block runs, on any machine.

    Presets with CUDA graphs (``reduce-overhead``, ``triton``, ``max-autotune``) run, where without a GPU they would
    step down. They run eager kernels, so numbers are those of preset ``aot_eager``. Plain ``torch.compile`` takes part
    with ``torch.compile(model, backend=emulation.backend)`` instead of ``mode="reduce-overhead"``. Code that was
    compiled in the block runs on unwatched after it.

    A new call of compiled code overwrites the outputs of earlier calls, by torch's own rule. Reading such an output
    then raises `hotloop.errors.StaleOutputError`, which names the output, its component, where it was made and where it
    is read. Reads that bypass torch's dispatcher (``print``, ``numpy()``, another thread without
    ``emulation.watching()``) find NaN. Code compiled by `hotloop.compile` copies its outputs, so nothing is raised.

    ``docs/concepts/cudagraph-lifetime.md`` has the rule and the remedies, ``docs/how-to/cudagraphs.md`` how the
    emulation differs from a GPU.

    Yields:
        the emulation: ``backend``; ``overwritten``, every output that was held when its memory was reused, read or not;
        ``skipped``, graphs that torch would not capture, with the reason; ``unmarked``, where a new generation began
        without a marked step.

    Raises:
        ConfigError: another emulation is in force.
    """
    if _running:
        raise ConfigError("cudagraph_emulation() is in force already: leave the outer block first")
    emulation = Emulation()
    _running.append(emulation)
    try:
        with cudagraphs.stand_in(emulation), steps.afresh(), emulation.watching():
            yield emulation
    finally:
        emulation.close()
        _running.remove(emulation)
