"""Compiles a graph of dynamo's ahead of time with eager kernels, and reports inputs and outputs of each graph of it."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx

from hotloop._torch.cudagraphs import storage_key
from hotloop._torch.graphs import last_user_frame
from hotloop._torch.ledger import private

if TYPE_CHECKING:
    from collections.abc import Callable

    Kind = Literal["forward", "backward", "inference"]
    Place = tuple[str, int] | None


@dataclasses.dataclass(frozen=True)
class TracedGraph:
    """A graph: forward, backward, or inference.

    Args:
        kind: which of the three.
        graph: its operations.
        inputs: a name for each input, in the user's terms where there is one.
        outputs: for each output its name, and the user's line that made it.
        written: the inputs, by place, that it writes into and whose memory may be another at each call, with the line.
    """

    kind: Kind
    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[tuple[str, Place], ...]
    written: dict[int, Place]

    @classmethod
    def read(cls, kind: Kind, graph: fx.GraphModule, names: tuple[str, ...]) -> TracedGraph:
        """Read a graph that was traced from inputs of these names."""
        nodes = list(graph.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        named = kind != "backward" and len(names) == len(placeholders)
        inputs = names if named else tuple(node.name for node in placeholders)
        made = nodes[-1].args[0]
        results = made if isinstance(made, list | tuple) else (made,)
        gradients = kind == "backward" and len(results) == len(names)
        outputs = tuple(
            (f"of {names[index]}" if gradients else getattr(result, "name", "constant"), _line(result))
            for index, result in enumerate(results)
        )
        written = {} if kind == "backward" else _written(nodes, placeholders)
        return cls(kind, graph, inputs, outputs, written)

    def call(self, args: list[Any]) -> Any:
        """Run its operations."""
        return self.graph.forward(*args)

    def constants(self) -> set[int]:
        """Return the memory of the tensors that the graph holds itself."""
        return {storage_key(value) for value in vars(self.graph).values() if isinstance(value, torch.Tensor)}


def compile_traced(
    graph: fx.GraphModule, inputs: list[Any], make: Callable[[TracedGraph], Callable[[list[Any]], Any]]
) -> Callable[..., Any]:
    """Compile a graph of dynamo's; ``make`` returns for each traced graph the function that runs it.

    The function is called with a list of the inputs, which it may empty, as Inductor's compiled code does.

    Raises:
        CapabilityMissingError: this torch has no ahead-of-time tracing to build on.
    """
    names = tuple(_name(node) for node in graph.graph.nodes if node.op == "placeholder")

    def compiler(kind: Kind) -> Callable[[fx.GraphModule, list[Any]], Callable[[list[Any]], Any]]:
        def compile_one(traced: fx.GraphModule, _inputs: list[Any]) -> Callable[[list[Any]], Any]:
            run = make(TracedGraph.read(kind, traced, names))

            @functools.wraps(run)
            def boxed(args: list[Any]) -> Any:
                return run(args)

            boxed._boxed_call = True  # type: ignore[attr-defined]  # noqa: SLF001 - it takes a list; in the ledger
            return boxed

        return compile_one

    backend = private("torch._dynamo.backends.common:aot_autograd")(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        keep_inference_input_mutations=True,  # as in Inductor: writes into inputs show in the graph
    )
    compiled: Callable[..., Any] = backend(graph, inputs)
    return compiled


def _written(nodes: list[fx.Node], placeholders: list[fx.Node]) -> dict[int, Place]:
    """Return the inputs that are written into, without parameters and buffers, whose memory stays where it is."""
    context = private("torch._guards:TracingContext").try_get()
    metadata = getattr(context, "fw_metadata", None)
    static = set(getattr(metadata, "static_input_indices", None) or ())
    places = {node: index for index, node in enumerate(placeholders)}
    found: dict[int, Place] = {}
    for node in nodes:
        target = node.args[0] if node.target is torch.ops.aten.copy_.default else None
        if isinstance(target, fx.Node) and target in places and places[target] not in static:
            found[places[target]] = _line(node)
    return found


def _line(node: Any) -> Place:
    return last_user_frame(node.meta.get("stack_trace") or "") if isinstance(node, fx.Node) else None


def _name(node: fx.Node) -> str:
    """Return an input's name as the user knows it: a parameter's path, or its place among the arguments."""
    source = getattr(node, "_dynamo_source", None)
    text = getattr(source, "name", "")
    text = str(text() if callable(text) else text)
    if not text:
        return node.name
    tables = ("_modules", "_parameters", "_buffers")
    if any(table in text for table in tables):
        keys = re.findall(r"\.(_\w+)\[['\"]?([^'\"\]]+)['\"]?\]", text)
        return ".".join(key for table, key in keys if table in tables)
    return re.sub(r"^L\['(\w+)'\]", r"\1", text)
