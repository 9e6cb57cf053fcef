"""Leaves absent what eager leaves absent: the gradient of an input that no output with a gradient depends on.

Where a caller uses one output of several (the logits, and not the auxiliary head; the last hidden state, and not the
pooler), the compiled backward fills the others' gradients up with zeros, and hands zeros to all that only these depend
on. Eager leaves no gradient there, and an optimizer then leaves the parameter alone; of zeros AdamW makes weight decay.
"""

from __future__ import annotations

import itertools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.graph import get_gradient_edge

from hotloop._torch.autograd import compiled_nodes
from hotloop._torch.graphs import example_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEEP = -1
"""Every bit is set: of an input of which nothing is known, the gradient is handed on as it is."""


class Absent:
    """Takes the gradients of one graph's inputs away that eager would not make; see `absent_of`.

    Args:
        reached: for each input of the graph, the outputs that depend on it, as bits.
    """

    def __init__(self, reached: tuple[int, ...]) -> None:
        self._reached = reached
        self._edges: tuple[int, ...] | None = None
        """For each edge that leaves the graph's node backwards, the outputs that depend on it."""

    def watch(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Have the backward of one run of the graph leave absent what no output with a gradient depends on."""
        nodes = compiled_nodes(outputs)
        if len(nodes) != 1:
            return
        node, places = nodes[0], dict[int, int]()
        for position, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                if output.grad_fn is not node:
                    return  # a view that was made outside of the graph: nobody knows whose gradient is whose
                places[output.output_nr] = position
        if self._edges is None or len(self._edges) != len(node.next_functions):
            self._edges = self._matched(node, inputs)
        run = _Run(self._edges, places)
        node.register_prehook(run.before)
        node.register_hook(run.after)

    def _matched(self, node: Any, inputs: Sequence[Any]) -> tuple[int, ...]:
        """Find which edge of the node leads to which input; their order is the same in each run of the code."""
        known = dict[tuple[Any, int], int]()
        for one, reached in zip(inputs, self._reached, strict=True):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                edge = get_gradient_edge(one)
                key = (edge.node, edge.output_nr)
                known[key] = known.get(key, 0) | reached
        return tuple(known.get(following, _KEEP) for following in node.next_functions)


class _Run:
    """One run of a graph, until its backward."""

    def __init__(self, edges: tuple[int, ...], places: dict[int, int]) -> None:
        self._edges, self._places = edges, places
        self._given = _KEEP

    def before(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which outputs have a gradient, before torch fills up the others'."""
        given = [place for place, one in enumerate(gradients) if one is not None]
        known = all(place in self._places for place in given)
        self._given = sum(1 << self._places[place] for place in given) if known else _KEEP

    def after(
        self, gradients: Sequence[torch.Tensor | None], _given: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Take away what comes from the others alone."""
        if all(edge & self._given for edge in self._edges):
            return None
        return tuple(one if edge & self._given else None for one, edge in zip(gradients, self._edges, strict=True))


def absent_of(graph: fx.GraphModule) -> Absent | None:
    """Give what leaves gradients absent in runs of a graph; None where every output depends on all that is trained."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs = _outputs(graph)
    trained = [_requires_grad(node) for node in inputs]
    wanted = sum(1 << position for position, one in enumerate(outputs) if _requires_grad(one))
    if wanted.bit_count() < 2 or not any(trained):  # noqa: PLR2004 - with one output there is nothing to choose
        return None
    reaching = _reaching(graph)
    if reaching is None:
        return None
    reached = tuple(
        sum(1 << position for position, mask in enumerate(reaching) if mask >> index & 1)
        for index in range(len(inputs))
    )
    if all(mask & wanted == wanted for mask, needs in zip(reached, trained, strict=True) if needs):
        return None
    return Absent(reached)


def _outputs(graph: fx.GraphModule) -> tuple[Any, ...]:
    found = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    return tuple(found) if isinstance(found, list | tuple) else (found,)


def _requires_grad(node: Any) -> bool:
    example = example_of(node) if isinstance(node, fx.Node) else None
    return isinstance(example, torch.Tensor) and example.requires_grad


def _reaching(graph: fx.GraphModule) -> list[int] | None:
    """Give for each output the inputs that it may depend on, as bits; None where that is not known.

    Rather one too many than one too few: whatever is written into some memory counts for all that reads it afterwards,
    under whatever name.
    """
    masks = dict[fx.Node, int]()
    number = itertools.count()
    written = dict[int, int]()
    """By memory: the inputs that what lies there may depend on."""
    for node in graph.graph.nodes:
        if node.op == "output":
            break
        mask = 1 << next(number) if node.op == "placeholder" else 0
        used = set[int]()
        for source in node.all_input_nodes:
            memory = memory_of(source)
            if memory is None:
                return None
            used |= memory
            mask |= masks[source]
        mask |= _joined(written, used)
        masks[node] = mask
        own = memory_of(node)
        if own is None:
            return None
        if not own or _may_write(node):  # what gives nothing back was called for what it writes
            own |= used
        for place in own:
            written[place] = written.get(place, 0) | mask
    found = []
    for one in _outputs(graph):
        memory = memory_of(one) if isinstance(one, fx.Node) else frozenset()
        if memory is None:
            return None
        found.append((masks[one] if isinstance(one, fx.Node) else 0) | _joined(written, memory))
    return found


def _may_write(node: fx.Node) -> bool:
    """Tell whether a call may write into its arguments without giving them back: only of plain functions it is known.

    Those of torch that write give back what they have written into.
    """
    known = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType)
    return node.op == "call_function" and not isinstance(node.target, known)


def _joined(written: dict[int, int], places: set[int] | frozenset[int]) -> int:
    mask = 0
    for place in places:
        mask |= written.get(place, 0)
    return mask
