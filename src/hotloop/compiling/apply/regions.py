"""Compiles a component by its repeated blocks: the traced graph is cut at their borders, and equal pieces share code.

Compiling each block in place would call dynamo's guards once a block (13 µs each) and leave embeddings, head and loss
eager. Here the component is traced as a whole, which is cheap; the pieces are compiled, which is not: one of all equal
blocks, and each stretch between them. Nothing of the component stays eager, and guards are checked once.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from hotloop._torch.graphs import bodies, module_stack
from hotloop.compiling.apply.pieces import Piece, walk

CompilePiece = Callable[[fx.GraphModule, list[Any], str], Callable[..., Any]]
_SKIPPED_OPS = frozenset({"placeholder", "output", "get_attr"})
_MIN_REPEATS = 2


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where to cut graphs: at the borders of these classes, if at least this share of the nodes is then saved.

    On an H200 Stable Diffusion's UNet, which declares its transformer blocks, took 136 s to compile by blocks and 103 s
    whole, for the same step: most of it is no repeated block. So what is not asked for must save half of the nodes.
    """

    blocks: tuple[str, ...] = ()
    least_saving: float = 0.0


WORTH_CUTTING = 0.5


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


def split(graph: fx.GraphModule, inputs: list[Any], cut: Cut, compile_piece: CompilePiece) -> Callable[..., Any] | str:
    """Cut a traced graph at the borders of its blocks, compile each different piece once, and join them.

    Returns:
        the joined callable with the graph's own signature, or the reason why the graph cannot be cut ("" where it holds
        fewer than two pieces, or cutting would not save what ``cut`` asks for).
    """
    kinds = set(cut.blocks)
    numbers = _assign(graph, kinds)
    if len(set(numbers.values())) < _MIN_REPEATS:
        return ""
    labels = {number: label for node, number in numbers.items() if (label := _block_of(node, graph, kinds)[1])}
    joined = split_module(graph, graph, lambda node: numbers[node], keep_original_order=True)
    pieces = walk(joined, inputs)
    if isinstance(pieces, str):
        return pieces
    keys = [piece.key() for piece in pieces]
    if _saving(pieces, keys) < cut.least_saving:
        return ""
    compiled: dict[Hashable, Callable[..., Any]] = {}
    for piece, key in zip(pieces, keys, strict=True):
        if key not in compiled:
            number = int(piece.name.rpartition("_")[2])
            single = piece.return_tuple()
            run = compile_piece(piece.graph, piece.inputs, labels.get(number, "rest"))
            compiled[key] = _unpack(run) if single else run
        delattr(joined, piece.name)
        # A plain attribute: the generated code calls it as it would the piece, without nn.Module's call.
        joined.__dict__[piece.name] = compiled[key]
    forward: Callable[..., Any] = joined.forward
    return forward


def _saving(pieces: list[Piece], keys: list[Hashable]) -> float:
    """Give the share of the nodes that need not be compiled, since an equal piece is."""
    sizes = [len(piece.graph.graph.nodes) for piece in pieces]
    different = dict(zip(keys, sizes, strict=True))
    return 1 - sum(different.values()) / sum(sizes)


def _assign(graph: fx.GraphModule, blocks: set[str]) -> dict[fx.Node, int]:
    """Number the pieces in order: a new one starts wherever the block changes."""
    numbers: dict[fx.Node, int] = {}
    current: object = object()
    number = -1
    for node in graph.graph.nodes:
        if node.op in _SKIPPED_OPS:
            continue
        unpacks = node.target is operator.getitem and numbers.get(node.args[0]) == number
        block = current if unpacks else _block_of(node, graph, blocks)
        if block != current:
            current, number = block, number + 1
        numbers[node] = number
    return numbers


def _block_of(node: fx.Node, graph: fx.GraphModule, blocks: set[str]) -> tuple[str, str]:
    """Give (path, class name) of the outermost block that a node belongs to."""
    for path, kind in module_stack(node):
        if kind in blocks:
            return path, kind.rpartition(".")[2]
    for body in bodies(node, graph):  # an activation checkpoint around a block is one node, the block is its body
        for inner in body.graph.nodes:
            if inner.op not in _SKIPPED_OPS:
                return _block_of(inner, body, blocks)
    return "", ""


def _unpack(run: Callable[..., Any]) -> Callable[..., Any]:
    def first(*args: Any) -> Any:
        return run(*args)[0]

    return first
