"""What leaves a CUDA graph may be held: outputs are copied at the boundary, and a step is marked only where it is safe.

Two facts carry it. Everything that a graph hands out is copied, so that the pool of the graphs holds nothing but what
forwards saved for their backward. And a step is marked at the entry of a call only while no such forward waits, in any
thread, since the mark allows torch to overwrite the pool.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hotloop._torch import cudagraphs
from hotloop._torch.autograd import compiled_nodes
from hotloop._torch.foreach import copies
from hotloop._torch.hooks import gradient_hooks
from hotloop.compiling.observe import holders
from hotloop.errors import StaleOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.compiling.observe import Tally

_SHOWN = 5
_PATIENCE = 8
"""Optimizer steps after which a forward that was kept is no longer taken to wait for a backward.

Until then torch records new graphs instead of using old ones again. A backward that comes later raises.
"""
_REMEDY = (
    "consume it before the next call, keep a copy of it (hotloop.own), or make it again; a gradient is dropped by "
    "zero_grad() before the forward, or accumulates into one that is there already (zero_grad(set_to_none=False))"
)


class Lookout(Protocol):
    """Wants to know what is held of what CUDA graphs handed out."""

    def copied(self, outputs: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """Outputs of a graph were copied at the boundary: the program gets the copies."""

    def marked(self) -> None:
        """A step was marked: what a graph handed out before may be overwritten from here on."""


class _OfThread(threading.local):
    """How many of the forwards that were given up this thread's graphs know of."""

    given_up = 0


class MarkedSteps:
    """The steps of all CUDA graphs in this process: which forwards wait for their backward, and when one is marked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the collector may run a user's code at any allocation, also inside of it
        self._optimizer_steps = 0
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._marks_after_optimizer = False
        self._given_up = 0
        self._of_thread = _OfThread()
        self.strict: weakref.WeakSet[Any] = weakref.WeakSet()
        """What hands out the memory of graphs without a copy: held outputs are looked for at each mark."""
        self.lookout: Lookout | None = None
        """Is told of each copy at the boundary, and of each mark; see `looking`."""

    @contextlib.contextmanager
    def looking(self, lookout: Lookout) -> Iterator[None]:
        """Have somebody told of copies and marks while the block runs."""
        before, self.lookout = self.lookout, lookout
        try:
            yield
        finally:
            self.lookout = before

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Know nothing of what ran before while the block runs, nor afterwards of what ran in it."""
        before = self._waiting, self._marks_after_optimizer, self.strict
        self._waiting, self._marks_after_optimizer, self.strict = weakref.WeakSet(), False, weakref.WeakSet()
        try:
            yield
        finally:
            self._waiting, self._marks_after_optimizer, self.strict = before

    def enter(self) -> bool:
        """At the entry of a compiled call: mark a step where no forward waits for a backward, and tell whether it was.

        Raises:
            StaleOutputError: under ``strict_lifetime``, an output is held that the call may overwrite.
        """
        with self._lock:
            waits, memory = self._anything_waits(), cudagraphs.memory()
            overwrites = not waits or memory.ends_generation()
            if len(self.strict) and overwrites and (held := list(memory.alive())):
                raise StaleOutputError(_still_held(held), held)
            if self._of_thread.given_up != self._given_up:
                memory.renew_outputs()
                self._of_thread.given_up = self._given_up
            if waits:
                return False
            cudagraphs.mark()
        if self.lookout is not None:
            self.lookout.marked()
        return True

    def _anything_waits(self) -> bool:
        """Tell whether a forward waits for its backward: a component's, or, as torch knows, another of this thread."""
        if len(self._waiting):
            last = self._optimizer_steps - _PATIENCE
            for node in list(self._waiting):
                made, at = node._hotloop_made  # noqa: SLF001 - ours
                if at < last or _lost(made):
                    self._waiting.discard(node)
                    self._given_up += 1
        return bool(len(self._waiting)) or cudagraphs.memory().forward_waits()

    def mark_where_safe(self) -> None:
        """Mark a step, unless a forward waits for its backward."""
        with self._lock:
            if not self._anything_waits():
                cudagraphs.mark()

    def mark_after_optimizer(self) -> None:
        """From now on mark a step after each optimizer step: a training step of code that is not ours ends there."""
        self._marks_after_optimizer = True

    def optimizer_stepped(self) -> None:
        """An optimizer has made a step."""
        self._optimizer_steps += 1
        if self._marks_after_optimizer:
            self.mark_where_safe()

    def waits(self, outputs: Any) -> None:
        """A forward ran whose graph keeps what its backward needs in the memory of the graphs."""
        for node in compiled_nodes(outputs):
            if hasattr(node, "_hotloop_made"):  # an input that is handed on, which another graph made
                continue
            node._hotloop_made = cudagraphs.generation(), self._optimizer_steps  # noqa: SLF001 - ours
            with self._lock:
                self._waiting.add(node)

    def runs_backward(self, node: Any, component: str) -> None:
        """The backward of a forward is about to run.

        Raises:
            StaleOutputError: somebody marked a step since the forward, so that what it saved is lost.
        """
        made, _ = getattr(node, "_hotloop_made", (None, 0))
        if made is not None and _lost(made):
            raise StaleOutputError(
                f"component {component!r}: a step was marked between a forward and its backward, which lets CUDA "
                "graphs overwrite what the forward saved: the gradients would be wrong. Call "
                "torch.compiler.cudagraph_mark_step_begin() before the forward or after the backward, or not at all: "
                f"hotloop marks steps where no backward is waiting (it waits for {_PATIENCE} optimizer steps)"
            )

    def ran_backward(self, node: Any, *, kept: bool) -> None:
        """A backward ran; unless its graph is kept for another, nothing waits for it any more."""
        if not kept:
            with self._lock:
                self._waiting.discard(node)


steps = MarkedSteps()


def _lost(made: int) -> bool:
    """Tell whether a step was marked since a forward ran in the generation ``made``, so that what it saved is lost."""
    return bool(cudagraphs.marked()) and made != cudagraphs.generation()


def _still_held(held: list[cudagraphs.GraphOutput]) -> str:
    shown = "; ".join(f"{one}, held by {', '.join(holders(one.storage))}" for one in held[:_SHOWN])
    more = f"; and {len(held) - _SHOWN} more" if len(held) > _SHOWN else ""
    return f"still held when a later call may overwrite it: {shown}{more}. Remedy: {_REMEDY}"


class Outputs:
    """Copies what one compiled graph hands out, except for what it was given."""

    def __init__(self, run: Callable[..., Any], tally_of: Callable[[], Tally]) -> None:
        self._run, self._tally_of = run, tally_of
        self._fresh: tuple[int, ...] | None = None
        self._alone = True

    def __call__(self, *args: Any) -> Any:
        """Run the graph and give its outputs."""
        outputs = self._run(*args)
        if self._fresh is None:
            self._look(args, outputs)
        assert self._fresh is not None
        mine = [outputs[place] for place in self._fresh]
        owned = copied(mine) if self._alone else copied_together(mine)
        if steps.lookout is not None:
            steps.lookout.copied(mine, owned)
        tally = self._tally_of()
        tally.copied += len(mine)
        tally.copied_bytes += sum(one.nbytes for one in mine)
        result = list(outputs)
        for place, one in zip(self._fresh, owned, strict=True):
            result[place] = one
        return result if isinstance(outputs, list) else tuple(result)

    def _look(self, args: tuple[Any, ...], outputs: Any) -> None:
        """Find which outputs are no inputs and no views of one: that is a property of the graph, so once will do."""
        given = {cudagraphs.storage_key(one) for one in args if isinstance(one, torch.Tensor)}
        tensors = {place: one for place, one in enumerate(outputs) if isinstance(one, torch.Tensor)}
        keys = {place: cudagraphs.storage_key(one) for place, one in tensors.items()}
        self._fresh = tuple(place for place, key in keys.items() if key not in given or not key)
        mine = [keys[place] for place in self._fresh]
        self._alone = len(set(mine)) == len(mine)


def copied(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors, each with its place in the autograd graph."""
    return [one.clone() for one in tensors]


def copied_together(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors some of which are one tensor or share memory: they do afterwards as well.

    Views that carry gradients are copied one by one, since autograd ties them to the tensor that they are views of.
    """
    memory: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for one in tensors:
        if id(one) in made:
            continue
        key = cudagraphs.storage_key(one)
        if one.requires_grad or not key or type(one) is not torch.Tensor:
            made[id(one)] = one.clone()
            continue
        if key not in memory:
            memory[key] = one.untyped_storage().clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=one.dtype, device=one.device)
        made[id(one)] = copy.set_(memory[key], one.storage_offset(), one.shape, one.stride())
    return [made[id(one)] for one in tensors]


def owned_gradients(node: Any, gradients: tuple[Any, ...], tally: Tally) -> tuple[Any, ...]:
    """Copy what a compiled backward hands out: a parameter's ``.grad`` would be the memory of the graph itself.

    A gradient that is added to one that is there already needs no copy.
    """
    leave = _added(node, gradients)
    places = [place for place, one in enumerate(gradients) if isinstance(one, torch.Tensor) and place not in leave]
    result = list(gradients)
    made = copies([gradients[place] for place in places])
    if steps.lookout is not None:
        steps.lookout.copied([gradients[place] for place in places], made)
    for place, copy in zip(places, made, strict=True):
        result[place] = copy
        tally.copied_bytes += copy.nbytes
    tally.copied += len(places)
    return tuple(result)


def _added(node: Any, gradients: tuple[Any, ...]) -> set[int]:
    """Give the places of gradients that autograd adds to an existing ``.grad`` and hands to nobody else."""
    nodes = [following for following, _ in node.next_functions]
    leaves = {place: one for place, one in enumerate(nodes) if hasattr(one, "variable")}
    first = next(iter(leaves.values()), None)
    if first is None or len(nodes) != len(gradients) or first.variable.grad is None:
        return set()
    return {place for place, one in leaves.items() if _is_added(one.variable) and cudagraphs.accumulates(one)}


def _is_added(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None and not any(gradient_hooks(parameter))
