"""CUDA graphs inside torch.compile, without a GPU: what a later call overwrites cannot be read by mistake."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.compiling.fallback import emulation

if TYPE_CHECKING:
    import contextlib


def cudagraph_emulation(*, holders: bool = False) -> contextlib.AbstractContextManager[emulation.Emulation]:
    """Have compiled code behave as CUDA graphs do while the block runs, on any machine.

    Presets with CUDA graphs (``reduce-overhead``, ``triton``, ``max-autotune``) run, where without a GPU they would
    step down; they run eager kernels, so numbers are those of preset ``aot_eager``. Plain ``torch.compile`` takes part
    with ``torch.compile(model, backend=emulation.backend)`` in place of ``mode="reduce-overhead"``. What is compiled in
    the block belongs to it: afterwards such code runs on, unwatched.

    A new call of compiled code overwrites what earlier ones left, by torch's own rule, and reading it then raises
    `hotloop.errors.StaleOutputError`, which names the output, its component, where it was made and where it is read.
    What reads past torch's dispatcher (``print``, ``numpy()``, another thread without ``emulation.watching()``) finds
    NaN. Code compiled by `hotloop.compile` copies what it hands out, so there is nothing to raise, unless it was
    compiled with ``strict_lifetime=True``.

    ``docs/cudagraph-lifetime.md`` has the rule, where this differs from a GPU, and what to do about what it finds.

    Args:
        holders: also find out who holds each output that is overwritten, which looks through all objects of the
            process: tens of milliseconds each.

    Yields:
        the emulation: ``backend``; ``overwritten``, every output that was held when its memory was reused, read or not;
        ``skipped``, graphs that torch would not capture, with the reason; ``unmarked``, where a new generation began
        without a marked step.

    Raises:
        ConfigError: one is in force already.
    """
    return emulation.cudagraph_emulation(holders=holders)
