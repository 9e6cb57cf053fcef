"""CUDA graphs inside torch.compile: which generation runs, and which tensors lie in their memory.

torch keeps the graphs of a thread in one tree with one pool of memory. The outputs of a graph are overwritten once a
graph of a new generation runs: ``docs/concepts/cudagraph-lifetime.md`` has the rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.graphs import last_user_frame
from hotloop._torch.ledger import private

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphOutput:
    """An output of a CUDA graph: ``kind`` is ``forward``, ``backward`` or ``inference``, ``index`` its place there.

    ``storage`` identifies its memory among the memory that is alive. ``file`` and ``line`` are the user's, of the
    operation that made it.
    """

    name: str
    index: int
    kind: str
    shape: tuple[int, ...]
    dtype: str
    component: str = ""
    file: str | None = None
    line: int | None = None
    storage: int = 0

    def __str__(self) -> str:
        whose = f" of component {self.component!r}" if self.component else ""
        made = f", made at {self.file}:{self.line}" if self.file else ""
        what = "gradient" if self.kind == "backward" else "output"
        return f"{what} {self.index} ({self.name}, {list(self.shape)}, {self.dtype}) of the {self.kind}{whose}{made}"


def mark() -> None:
    """Begin a step: the next graph that runs may overwrite the outputs of earlier graphs."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def marked() -> int:
    """Return the counter of marked steps, which torch counts down from zero: zero where nobody marks."""
    counter: int = private("torch._inductor.cudagraph_trees:MarkStepBox").mark_step_counter
    return counter


def generation() -> int:
    """Return the generation in force: of the marked steps, else of the calls of compiled code."""
    counted: int = marked() or private("torch._dynamo.mutation_guard:GenerationTracker").generation
    return counted


def forget_graphs() -> None:
    """Free all CUDA graphs of this thread, as Inductor does when torch forgets its compiled code."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        private("torch._inductor.cudagraph_trees:reset_cudagraph_trees")()


def captures_for_itself() -> bool:
    """Return whether compiled code of this thread has CUDA graphs of its own, in torch's trees."""
    return any(True for _ in Trees()._managers())  # noqa: SLF001 - of this file


def skips() -> int:
    """Return how often torch has skipped a capture in this process."""
    counted: int = private("torch._dynamo.utils:counters")["inductor"]["cudagraph_skips"]
    return counted


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's memory while it is alive; zero where it has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - in the ledger
    return key


class MemoryReference:
    """A reference to a tensor's memory that does not keep it alive, but keeps its address from being used again."""

    __slots__ = ("_reference",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = private("torch.multiprocessing.reductions:StorageWeakRef")(tensor.untyped_storage())

    def alive(self) -> bool:
        """Return whether anybody holds the memory."""
        return not self._reference.expired()

    @property
    def key(self) -> int:
        """The `storage_key` of tensors in this memory."""
        key: int = self._reference.cdata
        return key

    def storage(self) -> torch.UntypedStorage:
        """Return the memory, which must be alive."""
        storage: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self.key)  # noqa: SLF001 - ledger
        return storage


def is_fake(value: Any) -> bool:
    """Return whether a tensor is fake and has no memory, since torch is tracing."""
    return isinstance(value, private("torch._subclasses.fake_tensor:FakeTensor"))


class Trees:
    """The memory of torch's own graphs on the GPU; a stand-in without a GPU has the same methods."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of the graphs that ran in this thread's generation."""
        if not tensor.is_cuda or tensor.layout != torch.strided:
            return False
        return any(node._is_cuda_graph_recorded_tensor(tensor) for _, node in self._nodes())  # noqa: SLF001 - ledger

    def alive(self) -> Iterator[GraphOutput]:
        """Yield the outputs of the graphs of this thread's generation that somebody still holds."""
        for manager, last in self._nodes():
            for node in last._path_from_root:  # noqa: SLF001 - in the ledger
                kind = manager.id_to_mode[node.wrapped_function.id].name.lower()
                traces = node.stack_traces or ()
                for index, (storage, tensor) in enumerate(
                    zip(node.outputs_weakrefs, node.tensor_weakrefs, strict=False)
                ):
                    if storage is None or (key := storage()) is None:
                        continue
                    held = tensor() if tensor is not None else None
                    trace = traces[index] if index < len(traces) else None
                    file, line = last_user_frame(trace or "") or (None, None)
                    yield GraphOutput(
                        name=f"{kind}[{index}]",
                        index=index,
                        kind=kind,
                        shape=tuple(held.shape) if held is not None else (),
                        dtype=str(held.dtype).removeprefix("torch.") if held is not None else "a view of it is held",
                        file=file,
                        line=line,
                        storage=key,
                    )

    def forward_waits(self) -> bool:
        """Return whether torch believes that a forward of this thread waits for its backward."""
        return any(manager.running_forwards_with_pending_backwards for manager in self._managers())

    def backward_ran(self) -> None:
        """Mark that a backward of this thread ran outside of the graphs, so that torch lets no forward wait."""
        for manager in self._managers():
            manager.set_to_running_backward()

    def renew_outputs(self) -> None:
        """Make each graph of this thread return new tensors.

        torch returns the same tensors from replay to replay. So an object that holds the outputs of a forward which was
        given up would hold the outputs of the next forward.
        """
        for manager in self._managers():
            nodes = list(manager.get_roots())
            while nodes:
                node = nodes.pop()
                nodes += [child for children in node.children.values() for child in children]
                node.remove_node_cached_tensors()

    def _nodes(self) -> Iterator[tuple[Any, Any]]:
        """Yield the manager and the graph that ran last, for each GPU on which any graph ran."""
        for manager in self._managers():
            if manager.current_node is not None:
                yield manager, manager.current_node

    def _managers(self) -> Iterator[Any]:
        """Yield this thread's manager for each GPU that has a manager."""
        get = private("torch._inductor.cudagraph_trees:get_obj")
        containers = get(private("torch._inductor.cudagraph_trees:local"), "tree_manager_containers")
        for container in list(containers.values()):
            if container.tree_manager is not None:
                yield container.tree_manager


_in_use: list[Any] = [Trees()]
"""torch's trees, and the stand-ins that were put in their place."""


def memory() -> Any:
    """Return the memory of CUDA graphs that is in use: torch's, or a stand-in."""
    return _in_use[-1]


@contextlib.contextmanager
def stand_in(memory: Any) -> Iterator[None]:
    """Put a stand-in in the place of torch's trees while the block runs, with no step marked yet."""
    box = private("torch._inductor.cudagraph_trees:MarkStepBox")
    before, box.mark_step_counter = box.mark_step_counter, 0
    _in_use.append(memory)
    try:
        yield
    finally:
        _in_use.remove(memory)
        box.mark_step_counter = before
