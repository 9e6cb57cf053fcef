"""CUDA graphs inside torch.compile: which generation runs, and what lies in their memory.

torch keeps the graphs of a thread in one tree with one pool of memory. What a graph leaves is overwritten once a graph
of a new generation runs: ``docs/cudagraph-lifetime.md`` has the rule.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hotloop._torch.graphs import last_user_frame
from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphOutput:
    """One output of a CUDA graph: ``kind`` is ``forward``, ``backward`` or ``inference``, ``index`` its place there.

    ``storage`` identifies its memory among what is alive; ``file`` and ``line`` are the user's, of the operation.
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
        what = {"backward": "gradient"}.get(self.kind, "output")
        return f"{what} {self.index} ({self.name}, {list(self.shape)}, {self.dtype}) of the {self.kind}{whose}{made}"


class Memory(Protocol):
    """What knows the memory of CUDA graphs: torch's own trees, or what stands in for them without a GPU."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in the memory of the graphs that ran in this thread's generation."""

    def alive(self) -> Iterable[GraphOutput]:
        """Give what the graphs of this thread's generation left and somebody still holds."""

    def forward_waits(self) -> bool:
        """Tell whether torch takes a forward of this thread to wait for its backward."""

    def ends_generation(self) -> bool:
        """Tell whether somebody has marked a step since a graph of this thread ran: the next one overwrites."""

    def backward_ran(self) -> None:
        """A backward of this thread ran outside of the graphs: torch is to take no forward to wait any more."""

    def renew_outputs(self) -> None:
        """Have each graph of this thread hand out new tensors.

        torch hands out the same ones from replay to replay, so what holds the tensors of a forward that was given up
        would hold those of the next one.
        """


def mark() -> None:
    """Begin a step: the next graph that runs may overwrite what the earlier ones left."""
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


def marked() -> int:
    """Give the counter of marked steps, which torch counts down from zero: zero where nobody marks."""
    counter: int = private("torch._inductor.cudagraph_trees:MarkStepBox").mark_step_counter
    return counter


def generation() -> int:
    """Give the generation in force: of the marked steps, else of the calls of compiled code."""
    counted: int = marked() or private("torch._dynamo.mutation_guard:GenerationTracker").generation
    return counted


def forget_graphs() -> None:
    """Free all CUDA graphs of this thread, as Inductor does when torch forgets what it compiled."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        private("torch._inductor.cudagraph_trees:reset_cudagraph_trees")()


def accumulates(node: Any) -> bool:
    """Tell whether the backward in progress adds the gradient of a leaf to its ``.grad``.

    It does not where it hands the gradient to its caller (``torch.autograd.grad``), or where nobody asked for it.
    """
    try:
        runs: bool = private("torch._C:_will_engine_execute_node")(node)
    except (CapabilityMissingError, RuntimeError):  # the latter is how torch answers for a leaf that is handed out
        return False
    return runs


def skips() -> int:
    """Give how often torch has passed a capture over in this process."""
    counted: int = private("torch._dynamo.utils:counters")["inductor"]["cudagraph_skips"]
    return counted


def storage_key(tensor: torch.Tensor) -> int:
    """Give what identifies a tensor's memory while it is alive; zero where it has none of its own."""
    if tensor.layout != torch.strided:
        return 0
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - in the ledger
    return key


class MemoryReference:
    """Leads to a tensor's memory without keeping it alive, and keeps its address from being given out again."""

    __slots__ = ("_reference",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = private("torch.multiprocessing.reductions:StorageWeakRef")(tensor.untyped_storage())

    def alive(self) -> bool:
        """Tell whether anybody holds the memory."""
        return not self._reference.expired()

    @property
    def key(self) -> int:
        """What `storage_key` gives for tensors of this memory."""
        key: int = self._reference.cdata
        return key

    def storage(self) -> torch.UntypedStorage:
        """Give the memory, which must be alive."""
        storage: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(self.key)  # noqa: SLF001 - ledger
        return storage


def is_fake(value: Any) -> bool:
    """Tell whether a tensor has no memory, since somebody is tracing."""
    return isinstance(value, private("torch._subclasses.fake_tensor:FakeTensor"))


class Trees:
    """The memory of torch's own graphs on the GPU."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """See `Memory`."""
        if not tensor.is_cuda or tensor.layout != torch.strided:
            return False
        return any(node._is_cuda_graph_recorded_tensor(tensor) for _, node in self._nodes())  # noqa: SLF001 - ledger

    def alive(self) -> Iterator[GraphOutput]:
        """See `Memory`."""
        for manager, last in self._nodes():
            for node in last._path_from_root:  # noqa: SLF001 - in the ledger
                kind = manager.id_to_mode[node.wrapped_function.id].name.lower()
                traces = node.stack_traces or ()
                for index, (storage, tensor) in enumerate(
                    zip(node.outputs_weakrefs, node.tensor_weakrefs, strict=False)
                ):
                    if storage is not None and (key := storage()) is not None:
                        trace = traces[index] if index < len(traces) else None
                        yield _described(index, kind, key, trace, tensor() if tensor is not None else None)

    def forward_waits(self) -> bool:
        """See `Memory`."""
        return any(manager.running_forwards_with_pending_backwards for manager in self._managers())

    def ends_generation(self) -> bool:
        """See `Memory`."""
        return bool(marked()) and any(manager.current_gen != generation() for manager, _ in self._nodes())

    def backward_ran(self) -> None:
        """See `Memory`."""
        for manager in self._managers():
            manager.set_to_running_backward()

    def renew_outputs(self) -> None:
        """See `Memory`."""
        for manager in self._managers():
            nodes = list(manager.get_roots())
            while nodes:
                node = nodes.pop()
                nodes += [child for children in node.children.values() for child in children]
                node.remove_node_cached_tensors()

    def _nodes(self) -> Iterator[tuple[Any, Any]]:
        """Give the manager and the graph that ran last, for each GPU on which any did."""
        for manager in self._managers():
            if manager.current_node is not None:
                yield manager, manager.current_node

    def _managers(self) -> Iterator[Any]:
        """Give this thread's manager for each GPU that has one."""
        found = private("torch._inductor.cudagraph_trees:get_obj")
        containers = found(private("torch._inductor.cudagraph_trees:local"), "tree_manager_containers")
        for container in list(containers.values()):
            if container.tree_manager is not None:
                yield container.tree_manager


def _described(index: int, kind: str, key: int, trace: str | None, tensor: torch.Tensor | None) -> GraphOutput:
    file, line = last_user_frame(trace or "") or (None, None)
    shape = tuple(tensor.shape) if tensor is not None else ()
    dtype = str(tensor.dtype).removeprefix("torch.") if tensor is not None else "a view of it is held"
    return GraphOutput(
        name=f"{kind}[{index}]", index=index, kind=kind, shape=shape, dtype=dtype, file=file, line=line, storage=key
    )


_trees = Trees()
_stand_in: list[Memory] = []


def memory() -> Memory:
    """Give what knows the memory of CUDA graphs now."""
    return _stand_in[-1] if _stand_in else _trees


@contextlib.contextmanager
def stand_in(memory: Memory) -> Iterator[None]:
    """Have another answer than torch's trees while the block runs, in which nobody has marked a step yet."""
    box = private("torch._inductor.cudagraph_trees:MarkStepBox")
    before, box.mark_step_counter = box.mark_step_counter, 0
    _stand_in.append(memory)
    try:
        yield
    finally:
        _stand_in.remove(memory)
        box.mark_step_counter = before
