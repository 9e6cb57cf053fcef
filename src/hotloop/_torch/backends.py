"""The compilers behind the presets' backends, as functions from a graph to a callable."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from hotloop._torch.ledger import private
from hotloop._torch.settings import caching_apart

Compiler = Callable[[Any, Any], Callable[..., Any]]


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Compiler:
    """Give Inductor with a mode or options.

    Raises:
        RuntimeError: torch does not know an option, or its value has the wrong type.
        CapabilityMissingError: this torch has no Inductor wrapper.
    """
    patches = private("torch:_TorchCompileInductorWrapper")(mode, dict(options), dynamic).config
    compile_graph = private("torch._inductor.compile_fx:compile_fx")

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        with caching_apart("hotloop"):  # not with what plain torch.compile has put together of mixed-up backwards
            made: Callable[..., Any] = compile_graph(graph, inputs, inner_compile=_told_apart(), config_patches=patches)
        return made

    return compiler


def _told_apart() -> Callable[..., Any]:
    """Give Inductor's compiler of one forward or backward, with a cache that knows what a backward may write over.

    Inductor's own does not: one backward graph may belong to a forward that keeps what it has saved to itself, and to
    one that hands it out as well (a loss, and a loss beside its detached logits). Code for the first writes over what
    the second's caller holds.
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
    """Give ahead-of-time tracing with eager kernels."""
    compiler: Compiler = private("torch._dynamo.backends.registry:lookup_backend")("aot_eager")
    return compiler


def eager(graph: Any, _inputs: Any) -> Callable[..., Any]:
    """Run the traced graph as it is."""
    forward: Callable[..., Any] = graph.forward
    return forward


def forget_failed_libraries() -> None:
    """Forget which C++ libraries were asked for: one that failed is not compiled again before.

    Raises:
        CapabilityMissingError: this torch keeps them elsewhere.
    """
    for path in (
        "torch._inductor.codecache:CppCodeCache",
        "torch._inductor.codecache:CppPythonBindingsCodeCache",
    ):
        private(path).cache_clear()
