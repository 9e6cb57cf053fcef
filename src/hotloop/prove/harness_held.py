"""What a program holds of the memory of CUDA graphs when a step is marked: which output, made where, held by whom."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop.fallback.lifetime import steps
from hotloop.observe.holders import holders
from hotloop.prove.harness_result import Held

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterable

    from hotloop._torch.cudagraphs import GraphOutput

MOST = 50
"""Different outputs that are looked after: finding a holder looks through everything that is alive."""


class Lookout:
    """Notes held outputs at each mark; equal ones of later steps are counted."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], Held] = {}

    def looking(self) -> contextlib.AbstractContextManager[None]:
        """Give a context in which held outputs are noted."""
        return steps.looking(self.note)

    def note(self, alive: Iterable[GraphOutput]) -> None:
        """Note what is held, and by whom."""
        for one in alive:
            key = one.kind, one.index, one.shape, one.component, one.file, one.line
            if key in self._found:
                self._found[key] = dataclasses.replace(self._found[key], times=self._found[key].times + 1)
            elif len(self._found) < MOST:
                self._found[key] = Held(
                    output=str(one),
                    component=one.component,
                    file=one.file,
                    line=one.line,
                    holders=tuple(holders(one.storage)),
                )

    def held(self) -> list[Held]:
        """Give what was found, the most often held first."""
        return sorted(self._found.values(), key=lambda one: -one.times)
