"""Outputs of a CUDA graph may be held: they are copied at the boundary, and a step is marked only where it is safe.

Two facts carry it. Everything that a graph hands out is copied, so that the pool of the graphs holds nothing but what
forwards saved for their backward. And a step is marked at the entry of a call only while no such forward waits, in any
thread, since the mark allows torch to overwrite the pool.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import cudagraphs
from hotloop._torch.autograd import compiled_nodes
from hotloop._torch.foreach import copies
from hotloop.compiling.observe import active
from hotloop.errors import StaleOutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.compiling.observe import Tally

_PATIENCE = 8
"""Optimizer steps after which a forward that was kept is no longer taken to wait for a backward.

Until then torch records new graphs instead of using old ones again. A backward that comes later raises.
"""


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
        self.lookout: Any = None
        """Is told of each copy at the boundary, and of each mark; see `looking`."""

    @contextlib.contextmanager
    def looking(self, lookout: Any) -> Iterator[None]:
        """Call ``copied(outputs, copies)`` and ``marked()`` of a lookout while the block runs."""
        before, self.lookout = self.lookout, lookout
        try:
            yield
        finally:
            self.lookout = before

    @contextlib.contextmanager
    def afresh(self) -> Iterator[None]:
        """Forget earlier forwards while the block runs, and afterwards the forwards that ran in it."""
        before = self._waiting, self._marks_after_optimizer
        self._waiting, self._marks_after_optimizer = weakref.WeakSet(), False
        try:
            yield
        finally:
            self._waiting, self._marks_after_optimizer = before

    def enter(self) -> bool:
        """Mark a step at the entry of a compiled call, unless a forward waits for a backward; return whether it did."""
        with self._lock:
            waits = self._anything_waits()
            if self._of_thread.given_up != self._given_up:
                cudagraphs.memory().renew_outputs()
                self._of_thread.given_up = self._given_up
            if waits:
                return False
            cudagraphs.mark()
        if self.lookout is not None:
            self.lookout.marked()
        return True

    def _anything_waits(self) -> bool:
        """Return whether a forward waits for its backward: a component's, or one of this thread that torch knows."""
        if len(self._waiting):
            last = self._optimizer_steps - _PATIENCE
            for node in list(self._waiting):
                made, at = node._hotloop_made  # noqa: SLF001 - ours
                if at < last or self._is_lost(made):
                    self._waiting.discard(node)
                    self._given_up += 1
        return bool(len(self._waiting)) or cudagraphs.memory().forward_waits()

    def _is_lost(self, made: int) -> bool:
        """Return whether a step was marked since the generation ``made``, whose saved tensors are then lost."""
        return bool(cudagraphs.marked()) and made != cudagraphs.generation()

    def mark_where_safe(self) -> None:
        """Mark a step, unless a forward waits for its backward."""
        with self._lock:
            if not self._anything_waits():
                cudagraphs.mark()

    def mark_after_optimizer(self) -> None:
        """Mark a step after each optimizer step from now on: a training step of code that is not ours ends there."""
        self._marks_after_optimizer = True

    def optimizer_stepped(self) -> None:
        """Note that an optimizer has made a step."""
        self._optimizer_steps += 1
        if self._marks_after_optimizer:
            self.mark_where_safe()

    def waits(self, outputs: Any) -> None:
        """Note that a forward ran whose graph keeps what its backward needs in the memory of the graphs."""
        for node in compiled_nodes(outputs):
            if hasattr(node, "_hotloop_made"):  # another graph made this node, whose output is handed on
                continue
            node._hotloop_made = cudagraphs.generation(), self._optimizer_steps  # noqa: SLF001 - ours
            with self._lock:
                self._waiting.add(node)

    def runs_backward(self, node: Any, component: str) -> None:
        """Check that what a forward saved is intact, before its backward runs.

        Raises:
            StaleOutputError: somebody marked a step since the forward, so that its saved tensors are lost.
        """
        made, _ = getattr(node, "_hotloop_made", (None, 0))
        if made is not None and self._is_lost(made):
            raise StaleOutputError(
                f"component {component!r}: a step was marked between a forward and its backward, which lets CUDA "
                "graphs overwrite what the forward saved: the gradients would be wrong. Call "
                "torch.compiler.cudagraph_mark_step_begin() before the forward or after the backward, or not at all: "
                f"hotloop marks steps where no backward is waiting (it waits for {_PATIENCE} optimizer steps)"
            )

    def ran_backward(self, node: Any, *, kept: bool) -> None:
        """Note that a backward ran; unless its graph is kept for another backward, the forward waits no more."""
        if not kept:
            with self._lock:
                self._waiting.discard(node)


steps = MarkedSteps()


class Outputs:
    """Copies the outputs of one compiled graph, except for its inputs and views of them.

    Args:
        run: the graph.
    """

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run
        self._fresh: tuple[int, ...] | None = None
        """Places of the outputs that are neither inputs nor views of them."""
        self._alone = True
        """Whether these outputs share no memory."""

    def __call__(self, *args: Any) -> Any:
        """Run the graph and return its outputs."""
        outputs = self._run(*args)
        if self._fresh is None:
            self._find_fresh(args, outputs)
        assert self._fresh is not None
        mine = [outputs[place] for place in self._fresh]
        owned = [output.clone() for output in mine] if self._alone else copied_together(mine)
        if steps.lookout is not None:
            steps.lookout.copied(mine, owned)
        tally = active.tally
        tally.copied += len(mine)
        tally.copied_bytes += sum(output.nbytes for output in mine)
        result = list(outputs)
        for place, copy in zip(self._fresh, owned, strict=True):
            result[place] = copy
        return result if isinstance(outputs, list) else tuple(result)

    def _find_fresh(self, args: tuple[Any, ...], outputs: Any) -> None:
        """Find the outputs to copy. Each run of the graph has them at the same places, so once is enough."""
        inputs = {cudagraphs.storage_key(arg) for arg in args if isinstance(arg, torch.Tensor)}
        keys = {
            place: cudagraphs.storage_key(output)
            for place, output in enumerate(outputs)
            if isinstance(output, torch.Tensor)
        }
        self._fresh = tuple(place for place, key in keys.items() if key not in inputs or not key)
        mine = [keys[place] for place in self._fresh]
        self._alone = len(set(mine)) == len(mine)


def copied_together(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors; those that are the same tensor, or share memory, do so afterwards as well.

    Views that carry gradients are copied one by one, since autograd ties them to the tensor that they are views of.
    """
    memory: dict[int, torch.UntypedStorage] = {}
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) in made:
            continue
        key = cudagraphs.storage_key(tensor)
        if tensor.requires_grad or not key or type(tensor) is not torch.Tensor:
            made[id(tensor)] = tensor.clone()
            continue
        if key not in memory:
            memory[key] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made[id(tensor)] = copy.set_(memory[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    return [made[id(tensor)] for tensor in tensors]


def owned_gradients(gradients: tuple[Any, ...], tally: Tally) -> tuple[Any, ...]:
    """Copy what a compiled backward hands out: a parameter's ``.grad`` would be the memory of the graph itself."""
    places = [place for place, gradient in enumerate(gradients) if isinstance(gradient, torch.Tensor)]
    mine = [gradients[place] for place in places]
    result, made = list(gradients), copies(mine)
    if steps.lookout is not None:
        steps.lookout.copied(mine, made)
    for place, copy in zip(places, made, strict=True):
        result[place] = copy
        tally.copied_bytes += copy.nbytes
    tally.copied += len(places)
    return tuple(result)
