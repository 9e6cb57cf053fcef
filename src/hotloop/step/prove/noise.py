"""The noise of a step whose kernels are not deterministic: the room that proofs of a recording leave."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.measure import Difference

MOST, _EXACT = 4, 2
"""The most measurements: kernels that are not deterministic differ in some steps and not in others. And the most of a
step that repeats itself exactly, which may be luck the first time."""


class Noise:
    """The largest differences, by tensor, that runs of one step from one state have shown.

    Attributes:
        spread: by tensor, the largest difference so far, absolute and relative to the tensor.
        noisy: whether any two runs differed, in this run of the program or an earlier one.
    """

    def __init__(self) -> None:
        self.spread: dict[str, Difference] = {}
        self.noisy = False
        self._measured: list[dict[str, Difference]] = []

    def note(self, found: dict[str, Difference], earlier: dict[str, Difference] | None = None) -> None:
        """Add the differences of two runs.

        Args:
            found: the differences by tensor.
            earlier: the differences in earlier runs of the program, which is updated.
        """
        self._measured.append(found)
        known = [*self._measured, *([earlier] if earlier else [])]
        names = dict.fromkeys(name for measured in self._measured for name in measured)
        self.spread = {name: _furthest([measured[name] for measured in known if name in measured]) for name in names}
        self.noisy = any(difference.rms_difference > 0 for difference in self.spread.values())
        if earlier is not None:
            earlier.update(self.spread)

    def merged(self) -> Noise:
        """Return the noise with its measurements merged into one, so that there may be more of them."""
        noise = Noise()
        if self.spread:
            noise.note(self.spread)
        return noise

    def joined(self, found: dict[str, Difference]) -> Noise:
        """Return the noise with a further measurement, merged into one: sentinels of a long run measure often."""
        noise = Noise()
        if self.spread:
            noise.note(self.spread)
        noise.note(found)
        noise._measured = [noise.spread]
        return noise

    @property
    def measurable(self) -> bool:
        """Whether a further measurement may show more noise.

        A step that has repeated itself exactly twice will do so again. A step whose kernels differ from run to run may
        differ more than before, up to the most measurements.
        """
        return len(self._measured) < (MOST if self.noisy else _EXACT)


def _furthest(found: list[Difference]) -> Difference:
    if len(found) == 1:
        return found[0]
    furthest = max(found, key=lambda difference: difference.rms_difference)
    relative = [difference.relative for difference in found if difference.relative is not None]
    return dataclasses.replace(furthest, relative=max(relative)) if relative else furthest
