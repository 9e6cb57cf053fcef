"""The pieces that a graph was cut into: what goes into each, and which are the same program."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from hotloop._torch.fake import fake_mode, on_fakes, to_fake, version_of
from hotloop._torch.graphs import aliases

if TYPE_CHECKING:
    from collections.abc import Hashable


@dataclasses.dataclass(eq=False)
class Piece:
    """One piece by its attribute's name in the joined graph, and the fake values that go into it."""

    name: str
    graph: fx.GraphModule
    inputs: list[Any]

    def return_tuple(self) -> bool:
        """Make the piece return a tuple, as compilers want it; tell whether it did not."""
        output = next(node for node in self.graph.graph.nodes if node.op == "output")
        if isinstance(output.args[0], tuple | list):
            return False
        output.args = ((output.args[0],),)
        self.graph.recompile()
        return True

    def key(self) -> Hashable:
        """Give what makes two pieces the same program: nodes by position, inputs' metadata, which of them alias."""
        return _nodes(self.graph), tuple(_meta(value) for value in self.inputs), aliases(self.inputs)


def walk(joined: fx.GraphModule, inputs: list[Any]) -> list[Piece] | str:
    """Run the joined graph on fake values and note what goes into each piece, or why the pieces cannot stand alone.

    The values that tracing left in the nodes will not do: they are as after the last change in place.
    """
    tour = _Tour(joined)
    with torch.random.fork_rng(devices=[]):
        tour.run(*(to_fake(value, tour.mode) for value in inputs))
    return tour.refused or tour.pieces


class _Tour(fx.Interpreter):
    """Runs the pieces one after the other on fake values."""

    def __init__(self, joined: fx.GraphModule) -> None:
        super().__init__(joined)
        self.mode = fake_mode()
        self.pieces: list[Piece] = []
        self.refused = ""
        self._given: dict[int, Any] = {}  # by id, and kept: the interpreter frees values, and an id may come again

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().placeholder(target, args, kwargs)
        self._given[id(value)] = value
        return value

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return to_fake(super().get_attr(target, args, kwargs), self.mode)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG002 - fx calls it so
        piece = self.fetch_attr(target)
        self.pieces.append(Piece(str(target), piece, list(args)))
        before = [self._state(value) for value in args]
        with on_fakes(self.mode):
            result = piece.forward(*args)
        if before != [self._state(value) for value in args]:
            self.refused = f"{target} changes in place what another piece made"
        return result

    def _state(self, value: Any) -> Hashable:
        """Give what an operation in place moves: of the graph's own inputs (buffers) the metadata alone.

        Symbolic sizes are no part of it, since they print otherwise once the walk has fixed one.
        """
        if not isinstance(value, torch.Tensor):
            return None
        if value.is_inference():  # these count no versions
            return value.ndim, tuple(map(str, value.shape)), _strides(value)
        version = 0 if id(value) in self._given else version_of(value)
        return version, value.ndim, value.requires_grad


def _nodes(graph: fx.GraphModule) -> Hashable:
    index: dict[fx.Node, int] = {}
    nodes: list[Hashable] = []

    def position(node: fx.Node) -> Any:
        return _Position(index[node])

    def place(value: Any) -> str:
        return repr(fx.node.map_arg(value, position))

    for node in graph.graph.nodes:
        target: Hashable = "" if node.op in ("placeholder", "output") else node.target
        if node.op in ("get_attr", "call_module"):
            held = getattr(graph, str(node.target), None)
            target = _nodes(held) if isinstance(held, fx.GraphModule) else id(held)
        nodes.append((node.op, target, place(node.args), place(node.kwargs)))
        index[node] = len(index)
    return tuple(nodes)


class _Position:
    """A node by its place in the graph, so that names do not matter."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _strides(value: torch.Tensor) -> tuple[str, ...]:
    return tuple(map(str, value.stride())) if value.layout == torch.strided else ()


def _meta(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    shape, offset = tuple(map(str, value.shape)), ""
    with contextlib.suppress(RuntimeError, NotImplementedError):  # a sparse tensor has none
        offset = str(value.storage_offset())
    grad = (value.requires_grad, value.is_leaf)
    return (type(value), shape, _strides(value), offset, value.dtype, value.device, grad)
