"""Compiles a component by its repeated blocks: the traced graph is cut at their borders, and equal pieces share code.

Compiling each block in place would call dynamo's guards once a block (13 µs each) and leave embeddings, head and loss
eager. Here the component is traced as a whole, which is cheap. Then the pieces are compiled, which is expensive: one of
all equal blocks, and each stretch between blocks. Nothing of the component stays eager, and guards are checked once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from hotloop._torch.fake import FakeMode, version_of
from hotloop._torch.graphs import aliases, bodies, module_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

_SKIPPED_OPS = frozenset({"placeholder", "output", "get_attr"})
_MIN_REPEATS = 2


@dataclasses.dataclass(frozen=True)
class Cut:
    """Where to cut graphs: at the borders of these classes, if at least this share of the nodes is then saved.

    On an H200 Stable Diffusion's UNet, which declares its transformer blocks, took 136 s to compile by blocks and 103 s
    whole, for the same step: most of it is no repeated block. So ``regions="auto"`` cuts only where half is saved.
    """

    blocks: tuple[str, ...] = ()
    least_saving: float = 0.0


def declared_blocks(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the class names that the component's class declares as its repeated blocks (diffusers does)."""
    return tuple(getattr(type(module), "_repeated_blocks", None) or ())


def block_classes(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the qualified classes of a component's repeated blocks; empty where it has none.

    These are the classes that it declares, else the classes that stand at least twice in one of its outermost module
    lists or sequences and have parameters.
    """
    if declared := declared_blocks(module):
        return tuple(sorted({_qualified(part) for part in module.modules() if type(part).__name__ in declared}))
    return tuple(sorted(set(_repeated(module))))


def _repeated(module: torch.nn.Module) -> Iterator[str]:
    if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
        # A lone layer (a Linear, a Conv2d) is no block: it has nothing to fuse.
        counts = collections.Counter(
            _qualified(part)
            for part in module
            if next(part.children(), None) is not None and next(part.parameters(), None) is not None
        )
        repeated = [name for name, count in counts.items() if count >= _MIN_REPEATS]
        if repeated:
            yield from repeated
            return
    for child in module.children():
        yield from _repeated(child)


def _qualified(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def split(
    graph: fx.GraphModule,
    inputs: list[Any],
    cut: Cut,
    compile_piece: Callable[[fx.GraphModule, list[Any], str], Callable[..., Any]],
) -> Callable[..., Any] | str:
    """Cut a traced graph at the borders of its blocks, compile each different piece once, and join them.

    Args:
        graph: the traced graph; it is changed.
        inputs: example inputs of the graph.
        cut: where to cut.
        compile_piece: compiles a piece, from its graph, its fake inputs and the name of its block or ``rest``.

    Returns:
        the joined callable with the graph's own signature, or the reason why the graph cannot be cut ("" where it holds
        fewer than two pieces, or cutting would not save what ``cut`` asks for).
    """
    kinds = set(cut.blocks)
    numbers = _number_pieces(graph, kinds)
    if len(set(numbers.values())) < _MIN_REPEATS:
        return ""
    labels = {number: label for node, number in numbers.items() if (label := _block_of(node, graph, kinds)[1])}
    joined = split_module(graph, graph, lambda node: numbers[node], keep_original_order=True)
    # The values that tracing left in the nodes do not serve as inputs: they are as after the last change in place.
    walk = _Walk(joined)
    with torch.random.fork_rng(devices=[]):
        walk.run(*map(walk.mode.fake, inputs))
    if walk.refused:
        return walk.refused
    keys = [piece.key() for piece in walk.pieces]
    sizes = [len(piece.graph.graph.nodes) for piece in walk.pieces]
    different = dict(zip(keys, sizes, strict=True))
    if 1 - sum(different.values()) / sum(sizes) < cut.least_saving:
        return ""
    compiled: dict[Hashable, Callable[..., Any]] = {}
    for piece, key in zip(walk.pieces, keys, strict=True):
        if key not in compiled:
            label = labels.get(int(piece.name.rpartition("_")[2]), "rest")
            compiled[key] = piece.compile(compile_piece, label)
        delattr(joined, piece.name)
        # A plain attribute: the generated code calls it as it would the piece, without nn.Module's call.
        joined.__dict__[piece.name] = compiled[key]
    forward: Callable[..., Any] = joined.forward
    return forward


def _number_pieces(graph: fx.GraphModule, blocks: set[str]) -> dict[fx.Node, int]:
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
    """Return (path, class name) of the outermost block that a node belongs to; empty strings outside of blocks."""
    for path, kind in module_stack(node):
        if kind in blocks:
            return path, kind.rpartition(".")[2]
    for body in bodies(node, graph):  # an activation checkpoint around a block is one node, the block is its body
        for inner in body.graph.nodes:
            if inner.op not in _SKIPPED_OPS:
                return _block_of(inner, body, blocks)
    return "", ""


@dataclasses.dataclass(eq=False)
class _Piece:
    """One piece, by its attribute's name in the joined graph, and the fake values that go into it."""

    name: str
    graph: fx.GraphModule
    inputs: list[Any]

    def key(self) -> Hashable:
        """Return a key that equal programs share: nodes by position, the inputs' metadata, which inputs alias."""
        return _nodes_key(self.graph), tuple(self._metadata(value) for value in self.inputs), aliases(self.inputs)

    def _metadata(self, value: Any) -> Hashable:
        if not isinstance(value, torch.Tensor):
            return repr(value)
        shape, offset = tuple(map(str, value.shape)), ""
        with contextlib.suppress(RuntimeError, NotImplementedError):  # a sparse tensor has no offset
            offset = str(value.storage_offset())
        grad = (value.requires_grad, value.is_leaf)
        return (type(value), shape, _strides(value), offset, value.dtype, value.device, grad)

    def compile(
        self, compile_piece: Callable[[fx.GraphModule, list[Any], str], Callable[..., Any]], label: str
    ) -> Callable[..., Any]:
        """Compile the piece. Its graph has to return a tuple, so a single result is wrapped and unwrapped."""
        output = next(node for node in self.graph.graph.nodes if node.op == "output")
        if isinstance(output.args[0], tuple | list):
            return compile_piece(self.graph, self.inputs, label)
        output.args = ((output.args[0],),)
        self.graph.recompile()
        run = compile_piece(self.graph, self.inputs, label)
        return lambda *args: run(*args)[0]


class _Walk(fx.Interpreter):
    """Runs the pieces one after the other on fake values, and notes what goes into each.

    ``refused`` says why the pieces cannot stand alone, where one of them changes a value of another in place.
    """

    def __init__(self, joined: fx.GraphModule) -> None:
        super().__init__(joined)
        self.mode = FakeMode()
        self.pieces: list[_Piece] = []
        self.refused = ""
        self._inputs: dict[int, Any] = {}  # by id, and kept: the interpreter frees values, and an id may come again

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        self._inputs[id(value)] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self.mode.fake(super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - fx calls it so
        piece = self.fetch_attr(target)
        self.pieces.append(_Piece(str(target), piece, list(args)))
        before = [self._state(value) for value in args]
        with self.mode.running():
            result = piece.forward(*args)
        if before != [self._state(value) for value in args]:
            self.refused = f"{target} changes in place what another piece made"
        return result

    def _state(self, value: Any) -> Hashable:
        """Return what an operation in place changes; for the graph's own inputs (buffers) the metadata alone.

        Symbolic sizes are no part of it, since they print otherwise once the walk has fixed one.
        """
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_inference():  # these count no versions
            return value.ndim, tuple(map(str, value.shape)), _strides(value)
        version = 0 if id(value) in self._inputs else version_of(value)
        return version, value.ndim, value.requires_grad


def _nodes_key(graph: fx.GraphModule) -> Hashable:
    """Return the nodes of a graph by position, so that names do not matter."""
    index: dict[fx.Node, int] = {}
    nodes: list[Hashable] = []

    def position(node: fx.Node) -> Any:
        # A namespace prints as no literal argument does, so a node is never taken for a string or number.
        return types.SimpleNamespace(node=index[node])

    def by_position(value: Any) -> str:
        return repr(fx.node.map_arg(value, position))

    for node in graph.graph.nodes:
        target: Hashable = "" if node.op in ("placeholder", "output") else node.target
        if node.op in ("get_attr", "call_module"):
            held = getattr(graph, str(node.target), None)
            target = _nodes_key(held) if isinstance(held, fx.GraphModule) else id(held)
        nodes.append((node.op, target, by_position(node.args), by_position(node.kwargs)))
        index[node] = len(index)
    return tuple(nodes)


def _strides(value: torch.Tensor) -> tuple[str, ...]:
    return tuple(map(str, value.stride())) if value.layout == torch.strided else ()
