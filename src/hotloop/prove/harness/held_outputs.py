"""Finds the outputs of CUDA graphs that a program still holds when a step is marked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop._torch.cudagraphs import MemoryReference, memory, storage_key
from hotloop.prove.harness.result import Held

if TYPE_CHECKING:
    import torch

    from hotloop._torch.cudagraphs import GraphOutput

MOST = 50
"""Different outputs that are listed."""


class HeldOutputs:
    """Notes the outputs that are alive at the next mark, and counts equal ones of later steps.

    It is a lookout (`MarkedSteps.looking`). The program gets copies, so it runs as it always does. A copy that is alive
    at the mark stands for an output that would have been overwritten; a program that consumes its outputs earlier needs
    no copy.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[object, ...], Held] = {}
        self._out: list[tuple[GraphOutput, MemoryReference]] = []

    def copied(self, outputs: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """Follow the copies of outputs until the next mark."""
        known = {output.storage: output for output in memory().alive()}
        for output, copy in zip(outputs, copies, strict=True):
            if (described := known.get(storage_key(output))) is not None and storage_key(copy):
                self._out.append((described, MemoryReference(copy)))

    def marked(self) -> None:
        """Note the copies that are alive at a mark."""
        out, self._out = self._out, []
        for output, reference in out:
            if not reference.alive():
                continue
            key = output.kind, output.index, output.shape, output.component, output.file, output.line
            if (held := self._noted.get(key)) is not None:
                self._noted[key] = dataclasses.replace(held, times=held.times + 1)
            elif len(self._noted) < MOST:
                self._noted[key] = Held(
                    output=str(output), component=output.component, file=output.file, line=output.line
                )

    def held(self) -> list[Held]:
        """List the outputs that were held, the most often held first."""
        return sorted(self._noted.values(), key=lambda held: -held.times)
