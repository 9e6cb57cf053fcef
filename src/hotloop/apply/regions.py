"""Compiles a component by its repeated blocks: the traced graph is cut at their borders, and equal pieces share code.

Compiling each block in place would call dynamo's guards once a block (13 µs each) and leave embeddings, head and loss eager.
Here the component is traced as a whole, which is cheap; the pieces are compiled, which is not: one of all equal blocks, and
each stretch between them. Nothing of the component stays eager, and guards are checked once.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from hotloop._torch.graphs import example_value, module_stack

CompilePiece = Callable[[fx.GraphModule, list[Any], str], Callable[..., Any]]
_SKIPPED_OPS = frozenset({"placeholder", "output", "get_attr"})
_MIN_REPEATS = 2


def declared_blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Give the class names that the component's class declares as its repeated blocks (diffusers does)."""
    return tuple(getattr(type(module), "_repeated_blocks", None) or ())


def block_classes(module: torch.nn.Module) -> tuple[str, ...]:
    """Give the qualified classes of a component's repeated blocks; empty where it has none.

    These are the classes that it declares, else the classes that stand at least twice in one of its outermost module
    lists or sequences and have parameters.
    """
    declared = declared_blocks(module)
    if declared:
        found = {_qualified(part) for part in module.modules() if type(part).__name__ in declared}
        return tuple(sorted(found))
    return tuple(sorted(set(_repeated(module))))


def _repeated(module: torch.nn.Module) -> Iterator[str]:
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        counts = collections.Counter(_qualified(part) for part in module if _is_block(part))
        repeated = [name for name, count in counts.items() if count >= _MIN_REPEATS]
        if repeated:
            yield from repeated
            return
    for child in module.children():
        yield from _repeated(child)


def _is_block(module: torch.nn.Module) -> bool:
    """A lone layer (a Linear, a Conv2d) is no block: it has nothing to fuse."""
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


def _qualified(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def split(graph: fx.GraphModule, blocks: tuple[str, ...], compile_piece: CompilePiece) -> Callable[..., Any] | None:
    """Cut a traced graph at the borders of its blocks, compile each different piece once, and join them.

    Returns:
        the joined callable with the graph's own signature, or None where the graph holds fewer than two pieces.
    """
    pieces = _assign(graph, set(blocks))
    if len(set(pieces.values())) < _MIN_REPEATS:
        return None
    labels = {number: label for node, number in pieces.items() if (label := _block_of(node, set(blocks))[1])}
    joined = split_module(graph, graph, lambda node: pieces[node], keep_original_order=True)
    values = {node.name: example_value(node) for node in joined.graph.nodes if node.op == "placeholder"}
    compiled: dict[Hashable, Callable[..., Any]] = {}
    for node in joined.graph.nodes:
        if node.op == "get_attr":
            values[node.name] = getattr(joined, str(node.target))
        elif node.op == "call_function":  # operator.getitem on a piece that returns several values
            values[node.name] = values[node.args[0].name][node.args[1]]
        elif node.op == "call_module":
            piece = getattr(joined, node.target)
            inputs = [values[arg.name] if isinstance(arg, fx.Node) else arg for arg in node.args]
            single, values[node.name] = _outputs(piece)
            key = _key(piece, inputs)
            if key not in compiled:
                number = int(str(node.target).rpartition("_")[2])
                run = compile_piece(piece, inputs, labels.get(number, "rest"))
                compiled[key] = _unpack(run) if single else run
            delattr(joined, node.target)
            # A plain attribute: the generated code calls it as it would the piece, without nn.Module's call.
            joined.__dict__[str(node.target)] = compiled[key]
    forward: Callable[..., Any] = joined.forward
    return forward


def _assign(graph: fx.GraphModule, blocks: set[str]) -> dict[fx.Node, int]:
    """Number the pieces in order: a new one starts wherever the block changes."""
    numbers: dict[fx.Node, int] = {}
    current: object = object()
    number = -1
    for node in graph.graph.nodes:
        if node.op in _SKIPPED_OPS:
            continue
        block = _block_of(node, blocks)
        if block != current:
            current, number = block, number + 1
        numbers[node] = number
    return numbers


def _block_of(node: fx.Node, blocks: set[str]) -> tuple[str, str]:
    """Give (path, class name) of the outermost block that a node belongs to."""
    for path, kind in module_stack(node):
        if kind in blocks:
            return path, kind.rpartition(".")[2]
    return "", ""


def _outputs(piece: fx.GraphModule) -> tuple[bool, Any]:
    """Make a piece return a tuple, as compilers want it; tell whether it did not, and give its example output."""
    output = next(node for node in piece.graph.nodes if node.op == "output")
    result = output.args[0]
    if isinstance(result, tuple | list):
        return False, [example_value(node) if isinstance(node, fx.Node) else node for node in result]
    output.args = ((result,),)
    piece.recompile()
    return True, example_value(result)


def _unpack(run: Callable[..., Any]) -> Callable[..., Any]:
    def first(*args: Any) -> Any:
        return run(*args)[0]

    return first


def _key(piece: fx.GraphModule, inputs: list[Any]) -> Hashable:
    """Give what makes two pieces the same program: their nodes by position, and their inputs' metadata."""
    index: dict[fx.Node, int] = {}
    nodes: list[Hashable] = []

    def place(value: Any) -> str:
        by_position: Any = lambda node: _Position(index[node])  # noqa: E731 - typed as what map_arg wants
        return repr(fx.node.map_arg(value, by_position))

    for node in piece.graph.nodes:
        target = "" if node.op in ("placeholder", "output") else node.target
        constant = id(getattr(piece, str(node.target), None)) if node.op in ("get_attr", "call_module") else 0
        nodes.append((node.op, target if node.op != "get_attr" else "", constant, place(node.args), place(node.kwargs)))
        index[node] = len(index)
    return tuple(nodes), tuple(_meta(value) for value in inputs)


class _Position:
    """A node by its place in the graph, so that names do not matter."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _meta(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        strides = tuple(map(str, value.stride())) if value.layout == torch.strided else ()
        shape = tuple(map(str, value.shape))
        return (
            type(value),
            shape,
            strides,
            str(value.storage_offset()),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    return repr(value)
