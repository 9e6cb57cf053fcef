"""Leaves absent what eager leaves absent: the gradient of an input that no output with a gradient depends on.

Where a caller uses one output of several (the logits, and not the auxiliary head; the last hidden state, and not the
pooler), the compiled backward replaces the others' missing gradients by zeros, and passes zeros on to all inputs that
only these depend on. Eager leaves no gradient there, and an optimizer then leaves the parameter alone; from zeros AdamW
makes weight decay.

Dependence is read from the graph's data, and in doubt an output counts as dependent: behind a ``detach`` that stands in
compiled code, zeros stay.
"""

from __future__ import annotations

import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from hotloop._torch.autograd import compiled_nodes
from hotloop._torch.graphs import example_of, memory_of
from hotloop._torch.hooks import gradient_hook_functions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


class Absent:
    """Removes the gradients of one graph's inputs that eager would not make; see `absent_of`.

    Args:
        reached: for each input of the graph, the outputs that depend on it, as bits.
        wanted: the outputs that may have gradients, as bits.
    """

    def __init__(self, reached: tuple[int, ...], wanted: int) -> None:
        self._reached, self._wanted = reached, wanted
        self._edges: dict[int, int] | None = None
        """From edges that leave the graph's node backwards to inputs, those that not all outputs depend on."""
        self._count = 0

    def watch(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Make the backward of one run of the graph leave absent what no output with a gradient depends on."""
        nodes = compiled_nodes(outputs)
        if len(nodes) != 1 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return  # with several processes, the others wait for each gradient
        node, places = nodes[0], dict[int, int]()
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                if output.grad_fn is not node:
                    return  # a view that was made outside of the graph: nobody knows whose gradient is whose
                places[output.output_nr] = position
        if self._edges is None or self._count != len(node.next_functions):
            self._edges, self._count = self._match_edges(node, inputs), len(node.next_functions)
        edges = [(edge, self._reached[place], _reference(inputs[place])) for edge, place in self._edges.items()]
        run = _Run(edges, places)
        node.register_prehook(run.before)
        node.register_hook(run.after)

    def _match_edges(self, node: Any, inputs: Sequence[Any]) -> dict[int, int]:
        """Return which edge of the node leads to which input; their order is the same in each run of the code."""
        known = dict[tuple[Any, int], list[int]]()
        for place, tensor in enumerate(inputs):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                leads = get_gradient_edge(tensor)
                known.setdefault((leads.node, leads.output_nr), []).append(place)
        edges = {}
        for edge, following in enumerate(node.next_functions):
            places = known.get(following, [])
            if len(places) == 1 and self._reached[places[0]] & self._wanted != self._wanted:
                edges[edge] = places[0]
        return edges


def _reference(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Return a weak reference to a result. The graph holds leaves anyway, and torch swaps none that has weak ones."""
    return (lambda: tensor) if tensor.is_leaf else weakref.ref(tensor)


class _Run:
    """One run of a graph, until its backward.

    Args:
        edges: by position, with the outputs that depend on the edge's input, and that input.
        places: which output of the graph each output of its node is.
    """

    def __init__(self, edges: list[tuple[int, int, Callable[[], torch.Tensor | None]]], places: dict[int, int]) -> None:
        self._edges, self._places = edges, places
        self._given: int | None = None
        """The outputs that have a gradient, as bits; None where that is not known."""

    def before(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which outputs have a gradient, before torch replaces the missing gradients by zeros."""
        given = [place for place, gradient in enumerate(gradients) if gradient is not None]
        # The node may have more outputs than the graph (an input that it writes into, say), whose inputs nobody knows.
        known = all(place in self._places for place in given)
        self._given = sum(1 << self._places[place] for place in given) if known else None

    def after(
        self, gradients: Sequence[torch.Tensor | None], _given: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return the gradients without those that come from outputs without a gradient; None changes nothing."""
        if self._given is None:
            return None
        absent = {
            edge for edge, reached, tensor in self._edges if not reached & self._given and self._may_be_absent(tensor())
        }
        if not absent:
            return None
        return tuple(None if edge in absent else gradient for edge, gradient in enumerate(gradients))

    def _may_be_absent(self, tensor: torch.Tensor | None) -> bool:
        """Return whether no hook or foreign autograd node receives a tensor's gradient.

        torch calls hooks with None where there is no gradient, and eager calls none at all.
        """
        if tensor is None or next(iter(gradient_hook_functions(tensor)), None) is not None:
            return False
        return tensor.grad_fn is None or bool(compiled_nodes((tensor,)))


def absent_of(graph: fx.GraphModule) -> Absent | None:
    """Return what leaves gradients absent in runs of a graph; None where every output depends on all trained inputs."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    outputs = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
    trained = [_requires_grad(node) for node in inputs]
    wanted = sum(1 << position for position, output in enumerate(outputs) if _requires_grad(output))
    if wanted.bit_count() < 2 or not any(trained):  # noqa: PLR2004 - with one output there is nothing to choose
        return None
    reaching = _Dependence(graph).of(outputs)
    if reaching is None:
        return None
    reached = tuple(
        sum(1 << position for position, mask in enumerate(reaching) if mask >> index & 1)
        for index in range(len(inputs))
    )
    if all(mask & wanted == wanted for mask, needs in zip(reached, trained, strict=True) if needs):
        return None
    return Absent(reached, wanted)


def _requires_grad(node: Any) -> bool:
    example = example_of(node) if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


class _Dependence:
    """The inputs that each node of a graph may depend on, as bits; in doubt an input counts.

    Whatever is written into some memory counts for all nodes that read it afterwards, under whatever name.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._known = True
        self._masks = dict[fx.Node, int]()
        self._written = dict[int, int]()
        """By memory: the inputs that what lies there may depend on."""
        number = itertools.count()
        for node in graph.graph.nodes:
            if node.op == "output" or not self._known:
                break
            self._add(node, 1 << next(number) if node.op == "placeholder" else 0)

    def _add(self, node: fx.Node, mask: int) -> None:
        used = set[int]()
        for source in node.all_input_nodes:
            memory = memory_of(source)
            self._known = self._known and memory is not None
            used |= memory or set()
            mask |= self._masks[source]
        mask |= self._read(used)
        self._masks[node] = mask
        own = memory_of(node)
        if own is None:
            self._known = False
            return
        # torch's functions that write return what they have written into. Of callables other than plain functions, and
        # of a call that returns no tensor, nobody knows that.
        plain = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
        if not own or (node.op == "call_function" and not isinstance(node.target, plain)):
            own |= used
        for place in own:
            self._written[place] = self._written.get(place, 0) | mask

    def _read(self, memory: Iterable[int]) -> int:
        mask = 0
        for place in memory:
            mask |= self._written.get(place, 0)
        return mask

    def of(self, outputs: tuple[Any, ...]) -> list[int] | None:
        """Return the mask of each output; None where the memory of a node is not known."""
        masks = []
        for output in outputs:
            is_node = isinstance(output, fx.Node)
            memory = memory_of(output) if is_node else frozenset()
            if memory is None or not self._known:
                return None
            masks.append((self._masks[output] if is_node else 0) | self._read(memory))
        return masks
