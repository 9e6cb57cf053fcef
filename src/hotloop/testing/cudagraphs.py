"""CUDA graphs inside torch.compile, without a GPU: reading an output that a later call overwrote raises."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.compiling.fallback import emulation

if TYPE_CHECKING:
    import contextlib


def cudagraph_emulation(*, holders: bool = False) -> contextlib.AbstractContextManager[emulation.Emulation]:
    """Make compiled code behave as CUDA graphs do while the block runs, on any machine.

    Presets with CUDA graphs (``reduce-overhead``, ``triton``, ``max-autotune``) run, where without a GPU they would
    step down. They run eager kernels, so numbers are those of preset ``aot_eager``. Plain ``torch.compile`` takes part
    with ``torch.compile(model, backend=emulation.backend)`` instead of ``mode="reduce-overhead"``. Code that was
    compiled in the block runs on unwatched after it.

    A new call of compiled code overwrites the outputs of earlier calls, by torch's own rule. Reading such an output
    then raises `hotloop.errors.StaleOutputError`, which names the output, its component, where it was made and where it
    is read. Reads that bypass torch's dispatcher (``print``, ``numpy()``, another thread without
    ``emulation.watching()``) find NaN. Code compiled by `hotloop.compile` copies its outputs, so nothing is raised,
    unless it was compiled with ``strict_lifetime=True``.

    ``docs/cudagraph-lifetime.md`` has the rule, how the emulation differs from a GPU, and the remedies.

    Args:
        holders: also find out who holds each output that is overwritten, which looks through all objects of the
            process: tens of milliseconds each.

    Yields:
        the emulation: ``backend``; ``overwritten``, every output that was held when its memory was reused, read or not;
        ``skipped``, graphs that torch would not capture, with the reason; ``unmarked``, where a new generation began
        without a marked step.

    Raises:
        ConfigError: another emulation is in force.
    """
    return emulation.cudagraph_emulation(holders=holders)
