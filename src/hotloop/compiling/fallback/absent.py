"""Leaves absent what eager leaves absent: the gradient of an input that no output with a gradient depends on.

Where a caller uses one output of several (the logits, and not the auxiliary head; the last hidden state, and not the
pooler), the compiled backward fills the others' gradients up with zeros, and hands zeros to all that only these depend
on. Eager leaves no gradient there, and an optimizer then leaves the parameter alone; of zeros AdamW makes weight decay.

What depends on what is read from the graph's data, rather one dependence too many than one too few: behind a ``detach``
that stands in compiled code, zeros stay.
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
    from collections.abc import Sequence


class Absent:
    """Takes the gradients of one graph's inputs away that eager would not make; see `absent_of`.

    Args:
        reached: for each input of the graph, the outputs that depend on it, as bits.
        wanted: the outputs that may have gradients, as bits.
    """

    def __init__(self, reached: tuple[int, ...], wanted: int) -> None:
        self._reached, self._wanted = reached, wanted
        self._edges: dict[int, int] | None = None
        """Of the edges that leave the graph's node backwards, those to inputs that not all outputs depend on."""
        self._count = 0

    def watch(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Have the backward of one run of the graph leave absent what no output with a gradient depends on."""
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
            self._edges, self._count = self._matched(node, inputs), len(node.next_functions)
        edges = [(edge, self._reached[place], weakref.ref(inputs[place])) for edge, place in self._edges.items()]
        run = _Run(edges, places)
        node.register_prehook(run.before)
        node.register_hook(run.after)

    def _matched(self, node: Any, inputs: Sequence[Any]) -> dict[int, int]:
        """Find which edge of the node leads to which input; their order is the same in each run of the code."""
        known = dict[tuple[Any, int], list[int]]()
        for place, one in enumerate(inputs):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                leads = get_gradient_edge(one)
                known.setdefault((leads.node, leads.output_nr), []).append(place)
        found = {}
        for edge, following in enumerate(node.next_functions):
            places = known.get(following, [])
            if len(places) == 1 and self._reached[places[0]] & self._wanted != self._wanted:
                found[edge] = places[0]
        return found


class _Run:
    """One run of a graph, until its backward.

    Args:
        edges: by position, with the outputs that depend on the edge's input, and that input.
        places: which output of the graph each output of its node is.
    """

    def __init__(self, edges: list[tuple[int, int, weakref.ref[torch.Tensor]]], places: dict[int, int]) -> None:
        self._edges, self._places = edges, places
        self._given: int | None = None

    def before(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Note which outputs have a gradient, before torch fills up the others'."""
        given = [place for place, one in enumerate(gradients) if one is not None]
        # One that is no output of the graph's: an input that it writes into, say. Then nobody knows what depends on it.
        known = all(place in self._places for place in given)
        self._given = sum(1 << self._places[place] for place in given) if known else None

    def after(
        self, gradients: Sequence[torch.Tensor | None], _given: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Take away what comes from the others alone."""
        if self._given is None:
            return None
        absent = {edge for edge, reached, one in self._edges if not reached & self._given and _unheard(one())}
        if not absent:
            return None
        return tuple(None if edge in absent else one for edge, one in enumerate(gradients))


def _unheard(tensor: torch.Tensor | None) -> bool:
    """Tell whether nobody hears of a tensor's gradient but the tensor, or compiled code of ours.

    torch calls hooks with None where there is no gradient, and eager calls none at all.
    """
    if tensor is None or next(iter(gradient_hook_functions(tensor)), None) is not None:
        return False
    return tensor.grad_fn is None or bool(compiled_nodes((tensor,)))


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
    return Absent(reached, wanted)


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
