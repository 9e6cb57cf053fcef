"""The facts that a traced graph carries beside its nodes: module stacks, example values, the user's lines."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pathlib
import re
import sysconfig
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterator


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph with the marks that AOTAutograd reads, so that a rung that fails half-way spoils nothing."""
    fresh = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = fresh.graph_copy(graph.graph, mapping)
    fresh.output(output)
    for old, new in mapping.items():
        if old.op == "placeholder" and hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # noqa: SLF001 - in the ledger
        # dynamo's own, weak reference to a parameter: torch swaps none that has any, and a copy outlives the compile.
        new.meta.pop("grapharg", None)
    copied = fx.GraphModule(graph, fresh)
    copied.meta = dict(graph.meta)
    if hasattr(graph, "_param_name_to_source"):
        copied._param_name_to_source = graph._param_name_to_source  # noqa: SLF001 - in the ledger
    return copied


def module_stack(node: fx.Node) -> list[tuple[str, str]]:
    """Return the modules that a node was traced in, outermost first, as (path, qualified class name)."""
    stack = node.meta.get("nn_module_stack") or {}
    return [
        (path, kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}")
        for path, kind in stack.values()
    ]


def bodies(node: fx.Node, graph: fx.GraphModule) -> list[fx.GraphModule]:
    """Return the graphs that are arguments of a node: the body of an activation checkpoint, the branches of a cond."""
    held = [getattr(graph, str(arg.target), None) for arg in node.all_input_nodes if arg.op == "get_attr"]
    return [body for body in held if isinstance(body, fx.GraphModule)]


def aliases(values: list[Any]) -> tuple[int, ...]:
    """Return for each value the position of the first value that shares its memory; -1 for a value without memory."""
    seen: dict[int, int] = {}
    places: list[int] = []
    for position, value in enumerate(values):
        strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        memory = value.untyped_storage()._cdata if strided else None  # noqa: SLF001 - in the ledger
        places.append(-1 if memory is None else seen.setdefault(memory, position))
    return tuple(places)


def example_of(node: fx.Node) -> Any:
    """Return the example of a node's result, mostly a fake tensor; None where it has none."""
    return node.meta.get("example_value", node.meta.get("val"))


def memory_of(node: fx.Node) -> frozenset[int] | None:
    """Return the pieces of memory that a node's result lies in; None where they are unknown."""
    example = example_of(node)
    if example is None and node.op in {"call_module", "placeholder"}:
        return None
    tensors = list(_tensors(example))
    if any(tensor.layout != torch.strided for tensor in tensors):
        return None
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors)  # noqa: SLF001 - in the ledger


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def user_line(graph: fx.GraphModule) -> tuple[str, int] | None:
    """Return file and line of the first node of a graph that came from code outside torch."""
    for node in graph.graph.nodes:
        if (trace := node.meta.get("stack_trace")) and (place := last_user_frame(trace)):
            return place
    return None


def first_failure(graph: fx.GraphModule, inputs: list[Any]) -> tuple[Exception, tuple[str, int] | None] | None:
    """Run a graph node by node; return its exception and the user's line of the node that raised it, or None."""
    runner = _Steps(graph)
    try:
        runner.run(*inputs)
    except Exception as error:  # noqa: BLE001 - whatever eager raises is the answer
        return error, last_user_frame(runner.trace)
    return None


class _Steps(fx.Interpreter):
    """Interpreter that remembers the stack trace of the current node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # torch's own would change the message
        self.trace = ""

    def run_node(self, n: fx.Node) -> Any:
        self.trace = n.meta.get("stack_trace") or ""
        return super().run_node(n)


def last_user_frame(text: str) -> tuple[str, int] | None:
    """Return the innermost frame outside torch's own files from a formatted stack."""
    formatted = re.findall(r'File "([^"]+)", line (\d+)', text)
    frames = [(file, int(line)) for file, line in formatted if is_user_file(file)]
    return frames[-1] if frames else None


def is_user_file(file: str) -> bool:
    """Return whether a file is neither torch's, triton's, Python's importing, ours, nor generated by Inductor."""
    return not ("torchinductor_" in file or file.startswith(("<", *_library_folders())))


@functools.lru_cache(maxsize=4096)
def is_own_file(file: str) -> bool:
    """Return whether a file is the program's own: no installed package, and no part of Python."""
    if file.startswith(_standard_library()) or not is_user_file(file):
        return False
    folders = pathlib.Path(file).parents
    if any(folder.name in {"site-packages", "dist-packages"} for folder in folders):
        return False
    return not any(_is_installed(folder) for folder in folders)


def package_of(file: str) -> str:
    """Return the folder of the installed package that a file is in, or the file of a single module; else empty."""
    if is_own_file(file) or not is_user_file(file) or file.startswith(_standard_library()):
        return ""
    parts = (pathlib.Path(file), *pathlib.Path(file).parents)
    for part in parts:
        if part.parent.name in {"site-packages", "dist-packages"} or _is_installed(part):
            return file if part is parts[0] else os.path.join(part, "")  # noqa: PTH118
    return ""


@functools.lru_cache(maxsize=4096)
def _is_installed(folder: pathlib.Path) -> bool:
    """Return whether an installer left a record of a package beside its folder (``pip install --target``)."""
    for record in folder.parent.glob("*.dist-info/RECORD"):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a record of somebody else's, or no text
            if any(line.startswith(f"{folder.name}/") for line in record.read_text(encoding="utf-8").splitlines()):
                return True
    return False


@functools.lru_cache(maxsize=4096)
def is_standard_library(file: str) -> bool:
    """Return whether a file is a part of Python; packages may be installed beside Python's files."""
    return file.startswith(_standard_library()) and not {"site-packages", "dist-packages"} & {*pathlib.Path(file).parts}


@functools.cache
def _standard_library() -> tuple[str, ...]:
    """Return the folders that Python's own modules may be in."""
    paths = sysconfig.get_paths()
    return tuple({os.path.join(paths[name], "") for name in ("stdlib", "platstdlib")})  # noqa: PTH118


@functools.cache
def _library_folders() -> tuple[str, ...]:
    """Return the folders of code that is not the user's, among them Inductor's cache wherever it is."""
    torch_home = os.path.dirname(torch.__file__)  # noqa: PTH120 - compared as strings, millions of times
    ours = os.path.dirname(os.path.dirname(__file__))  # noqa: PTH120
    folders = [torch_home, ours, os.path.dirname(importlib.__file__)]  # noqa: PTH120
    triton = importlib.util.find_spec("triton")
    folders += list(triton.submodule_search_locations or ()) if triton else []
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if where := os.environ.get(name):
            folders += [where, os.path.realpath(where)]
    return tuple(os.path.join(folder, "") for folder in folders)  # noqa: PTH118
