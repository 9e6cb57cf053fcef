"""The compilers behind the presets' backends, as functions from a graph to a callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hotloop._torch.ledger import private

Compiler = Callable[[Any, Any], Callable[..., Any]]


def inductor(mode: str | None, options: Mapping[str, Any], dynamic: bool | None) -> Compiler:
    """Give Inductor with a mode or options.

    Raises:
        RuntimeError: torch does not know an option, or its value has the wrong type.
        CapabilityMissingError: this torch has no Inductor wrapper.
    """
    compiler: Compiler = private("torch:_TorchCompileInductorWrapper")(mode, dict(options), dynamic)
    return compiler


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
