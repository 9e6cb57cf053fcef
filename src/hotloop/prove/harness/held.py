"""What a program holds of the memory of CUDA graphs when a step is marked: which output, made where, held by whom."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop._torch.cudagraphs import MemoryReference, memory, storage_key
from hotloop.compiling.observe.holders import holders
from hotloop.prove.harness.result import Held

if TYPE_CHECKING:
    import torch

    from hotloop._torch.cudagraphs import GraphOutput

MOST = 50
"""Different outputs that are looked after: finding a holder looks through everything that is alive."""


class HeldOutputs:
    """Notes what was handed out and is alive at the next mark; equal ones of later steps are counted.

    What a program gets are copies, so it runs on as it does; each copy that is alive at the mark is one that would have
    been overwritten, and that a program which consumed it earlier would have spared.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Held] = {}
        self._out: list[tuple[GraphOutput, MemoryReference]] = []

    def copied(self, outputs: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
        """See `hotloop.compiling.fallback.lifetime.Lookout`."""
        known = {one.storage: one for one in memory().alive()}
        for output, copy in zip(outputs, copies, strict=True):
            if (described := known.get(storage_key(output))) is not None and storage_key(copy):
                self._out.append((described, MemoryReference(copy)))

    def marked(self) -> None:
        """See `hotloop.compiling.fallback.lifetime.Lookout`."""
        out, self._out = self._out, []
        for described, reference in out:
            if reference.alive():
                self._note(described, reference.key)

    def _note(self, one: GraphOutput, storage: int) -> None:
        key = one.kind, one.index, one.shape, one.component, one.file, one.line
        if key in self._found:
            self._found[key] = dataclasses.replace(self._found[key], times=self._found[key].times + 1)
        elif len(self._found) < MOST:
            self._found[key] = Held(
                output=str(one),
                component=one.component,
                file=one.file,
                line=one.line,
                holders=tuple(holders(storage)),
            )

    def held(self) -> list[Held]:
        """Give what was found, the most often held first."""
        return sorted(self._found.values(), key=lambda one: -one.times)
