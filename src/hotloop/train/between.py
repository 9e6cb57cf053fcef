"""Beside a hot loop: components that run compiled without gradients, outside of the steps that the loop owns."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.control import Installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hotloop.events import Event
    from hotloop.train.compiling import Compiling


class Between:
    """Puts compiled code on for a block, and takes it off again: a loop finds the models as its last step left them.

    Args:
        compiling: compiles what is asked for; its presets of training are ``none``.
    """

    def __init__(self, compiling: Compiling) -> None:
        modules = {
            name: part for name in compiling.chosen if isinstance(part := compiling.parts[name], torch.nn.Module)
        }
        self.left = [name for name in compiling.chosen if name not in modules]
        """Functions: they cannot be taken off again, and stay eager."""
        compiling.chosen = {name: both for name, both in compiling.chosen.items() if name in modules}
        self._compiling, self._modules = compiling, list(modules.values())
        self._ours: list[Installed] = []

    def names(self) -> str:
        """Name what is to be compiled, each with its preset; empty where nothing is."""
        return self._compiling.names()

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Run what was asked for compiled while the block runs; the first time it is tried, and compiled."""
        theirs = [Installed(module) for module in self._modules]
        try:
            for one in self._ours:
                one.put_back()
            self._compiling.put_on()
            yield
        finally:
            self._ours = [Installed(module) for module in self._modules]
            for one in theirs:
                one.put_back()

    def observed(self, events: Sequence[Event]) -> None:
        """Say what does not run as asked, where something was observed."""
        if events and self._compiling.applied:
            with self.in_force():
                self._compiling.after_validation(events)

    def beside(self, steps: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Add to what runs of each component in the steps what runs of it between them."""
        with self.in_force() if self._compiling.applied else contextlib.nullcontext():
            ours = self._compiling.status()
        return {name: _joined(one, ours[name]) for name, one in steps.items()}


def _joined(steps: dict[str, Any], between: Mapping[str, Any]) -> dict[str, Any]:
    if between.get("inference", "none") == "none":
        return steps
    modes = {
        **{mode: counts for mode, counts in steps.get("modes", {}).items() if mode != "inference"},
        **{mode: counts for mode, counts in between.get("modes", {}).items() if mode == "inference"},
    }
    more = {key: between[key] for key in ("inference", "outputs_copied", "cudagraphs_skipped") if key in between}
    return {**steps, **more, "modes": modes, "causes": [*steps["causes"], *between["causes"]]}
