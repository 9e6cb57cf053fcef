"""What a run of the recipe `focus` came to, in lines: the ways to focus side by side, and how often networks ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PACES = 4
"""Different numbers of calls a step that are told, the most frequent first."""


def ways(metrics: Mapping[str, float]) -> Iterator[str]:
    """Say what the lens is worth, at equal budget, on held-out texts."""
    if metrics:
        others = {name: metrics[f"loss_{name}"] for name in ("recency", "random")}
        said = ", ".join(f"{name} {loss:.4f} ({loss - metrics['loss']:+.4f})" for name, loss in others.items())
        yield f"Nats a token at equal budget, at the end: the lens {metrics['loss']:.4f}; {said}"


def paces(components: Mapping[str, Any]) -> Iterator[str]:
    """Say how often each network under CUDA graphs was called between two optimizer steps, and on which shapes."""
    for name, status in components.items():
        for mode, counts in status.get("modes", {}).items():
            if not counts.get("shapes"):
                continue
            pace = sorted(counts["calls_per_step"].items(), key=lambda one: -one[1])[:_PACES]
            often = ", ".join(f"{calls} ({steps:,} times)" for calls, steps in pace) or "none"
            shapes = "; ".join(f"{shape} ({calls:,} times)" for shape, calls in counts["shapes"].items())
            inside = counts["calls_in_backward"]
            yield f"Calls of {name} in {mode}: {often} a step, {inside} inside a backward, on {shapes}"
