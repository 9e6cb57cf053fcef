"""The compilers behind the presets' backends, and which of them this torch has.

A build may come without Inductor, a platform without dynamo.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

from hotloop._torch.ledger import capability, private
from hotloop._torch.settings import caching_apart

Compiler = Callable[[Any, Any], Callable[..., Any]]


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Compiler:
    """Return Inductor with a mode or options.

    Raises:
        RuntimeError: torch does not know an option, or its value has the wrong type.
        CapabilityMissingError: this torch has no Inductor wrapper.
    """
    patches = private("torch:_TorchCompileInductorWrapper")(mode, dict(options), dynamic).config
    compile_graph = private("torch._inductor.compile_fx:compile_fx")

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        with caching_apart("hotloop, draws apart"):  # plain torch.compile's may mix up backwards, or merge draws
            made: Callable[..., Any] = compile_graph(
                graph, inputs, inner_compile=_compiler_of_one(), config_patches=patches
            )
        return made

    return compiler


def _compiler_of_one() -> Callable[..., Any]:
    """Return Inductor's compiler of a forward or backward, with cache entries by what a backward may write over.

    Inductor's own cache ignores that. The same backward graph may belong to a forward that keeps its saved tensors to
    itself, and to a forward that also returns them (a loss, and a loss beside its detached logits). Code for the first
    writes over the tensors that the second's caller holds.
    """
    inner = private("torch._inductor.compile_fx:compile_fx_inner")

    @functools.wraps(inner)
    def compile_one(graph: Any, inputs: Any, **settings: Any) -> Any:
        if not settings.get("is_backward"):
            return inner(graph, inputs, **settings)
        context = private("torch._guards:TracingContext").try_get()
        written = getattr(getattr(context, "fw_metadata", None), "bw_donated_idxs", None)
        with caching_apart(f"writes over {written}"):
            return inner(graph, inputs, **settings)

    return compile_one


def aot_eager() -> Compiler:
    """Return the compiler that traces ahead of time and runs eager kernels."""
    compiler: Compiler = private("torch._dynamo.backends.registry:lookup_backend")("aot_eager")
    return compiler


def eager(graph: Any, _inputs: Any) -> Callable[..., Any]:
    """Run the traced graph as it is."""
    forward: Callable[..., Any] = graph.forward
    return forward


@functools.cache
def dynamo_missing() -> str:
    """Return why nothing can be traced with this torch; empty where it can be."""
    try:
        spec = importlib.util.find_spec("torch._dynamo")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "this torch has no torch._dynamo"
    return capability(
        "compile",
        "torch._dynamo.callback:callback_handler",
        "torch._dynamo.utils:get_compilation_metrics",
        "torch._dynamo:config",
        "torch._functorch:config",
    ).reason


@functools.cache
def inductor_missing() -> str:
    """Return why there is no Inductor; empty where there is."""
    try:
        importlib.import_module("torch._inductor.compile_fx")
    except ImportError as error:
        return f"this torch has no working Inductor ({error})"
    return capability("inductor", "torch:_TorchCompileInductorWrapper").reason
