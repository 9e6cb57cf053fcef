"""What a traced graph carries beside its nodes: module stacks, example values, the user's lines."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with the marks that AOTAutograd reads, so that a rung that fails half-way spoils nothing."""
    fresh = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = fresh.graph_copy(graph.graph, mapping)
    fresh.output(output)
    for old, new in mapping.items():
        if old.op == "placeholder" and hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # noqa: SLF001 - in the ledger
    copied = fx.GraphModule(graph, fresh)
    copied.meta = dict(graph.meta)
    if hasattr(graph, "_param_name_to_source"):
        copied._param_name_to_source = graph._param_name_to_source  # noqa: SLF001 - in the ledger
    return copied


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Give the modules that a node was traced in, outermost first, as (path, qualified class name)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for path, kind in stack.values()
    ]


def bodies(node: fx.Node, graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Give the graphs that a node takes as arguments: the body of an activation checkpoint, the branches of a cond."""
    held = [getattr(graph, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return [body for body in held if isinstance(body, fx.GraphModule)]


def aliases(values: list[Any]) -> tuple[int, ...]:
    """Give for each value the position of the first that shares its memory; -1 for what has none."""
    seen: dict[StorageWeakRef, int] = {}
    places: list[int] = []
    for position, value in enumerate(values):
        strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        memory = StorageWeakRef(value.untyped_storage()) if strided else None  # type: ignore[no-untyped-call]
        places.append(-1 if memory is None else seen.setdefault(memory, position))
    return tuple(places)


def user_line(graph: fx.GraphModule) -> tuple[str, int] | None:
    """Give file and line of the first node of a graph that came from code outside torch."""
    for node in graph.graph.nodes:
        if (trace := node.meta.get("stack_trace")) and (found := last_user_frame(trace)):
            return found
    return None


def first_failure(graph: fx.GraphModule, inputs: list[Any]) -> tuple[Exception, tuple[str, int] | None] | None:
    """Run a graph node by node; give what it raises, and the user's line of the node that raised it, or None."""
    runner = _Steps(graph)
    try:
        runner.run(*inputs)
    except Exception as error:  # noqa: BLE001 - whatever eager raises is the answer
        return error, last_user_frame(runner.trace)
    return None


class _Steps(fx.Interpreter):
    """Remembers which line of the user's it is at."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # torch's own would change the message
        self.trace = ""

    def run_node(self, n: fx.Node) -> Any:
        self.trace = n.meta.get("stack_trace") or ""
        return super().run_node(n)


def last_user_frame(text: str) -> tuple[str, int] | None:
    """Give the innermost frame outside torch's own files from a formatted stack."""
    frames = [(file, int(line)) for file, line in _FRAME.findall(text) if is_user_file(file)]
    return frames[-1] if frames else None


def is_user_file(file: str) -> bool:
    """Tell whether a file is neither torch's, triton's, ours, nor generated."""
    here, library = __file__.rsplit("_torch", 1)[0], torch.__file__.rsplit("__init__", 1)[0]
    return not (
        file.startswith(("<", here, library)) or "torchinductor" in file or "/triton/" in file or "importlib" in file
    )


def user_frames(frames: Iterable[Any]) -> list[Any]:
    """Keep the frames of user code, outermost first."""
    return [frame for frame in frames if is_user_file(frame.filename)]
