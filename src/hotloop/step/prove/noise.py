"""How far a step is from itself where its kernels are not deterministic: what proofs of a recording allow for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotloop.measure import Difference

MOST, _EXACT = 4, 2
"""How often a step is run twice at most: kernels that are not deterministic differ at one step and not at another. And
how often where the step repeats itself exactly, which once may be luck."""


class Noise:
    """The largest differences, by tensor, that runs of one step from one state have shown.

    Attributes:
        spread: by name of a tensor, the largest difference yet, as such and beside the tensor's size.
        noisy: whether any run differed from another, in this run of the program or an earlier one.
    """

    def __init__(self) -> None:
        self.spread: dict[str, Difference] = {}
        self.noisy = False
        self._measured: list[dict[str, Difference]] = []

    def note(self, found: dict[str, Difference], earlier: dict[str, Difference] | None = None) -> None:
        """Add what two runs of the step have just shown.

        Args:
            found: how far the two runs were apart.
            earlier: how far earlier runs of the program were, which gets what is noted now.
        """
        self._measured.append(found)
        known = [*self._measured, *([earlier] if earlier else [])]
        names = dict.fromkeys(name for measured in self._measured for name in measured)
        self.spread = {name: _furthest([measured[name] for measured in known if name in measured]) for name in names}
        self.noisy = any(difference.rms_difference > 0 for difference in self.spread.values())
        if earlier is not None:
            earlier.update(self.spread)

    def joined(self, found: dict[str, Difference]) -> Noise:
        """Return the noise with a further measurement, both kept as one: a long run of sentinels measures often."""
        noise = Noise()
        if self.spread:
            noise.note(self.spread)
        noise.note(found)
        noise._measured = [noise.spread]
        return noise

    @property
    def measurable(self) -> bool:
        """Return whether to run the step twice once more could tell anything new.

        A step that has repeated itself exactly twice will do so again. A step whose kernels differ from run to run may
        differ more than it did, yet it is not measured for ever.
        """
        return len(self._measured) < (MOST if self.noisy else _EXACT)


def _furthest(found: list[Difference]) -> Difference:
    if len(found) == 1:
        return found[0]
    furthest = max(found, key=lambda difference: difference.rms_difference)
    relative = [difference.relative for difference in found if difference.relative is not None]
    return dataclasses.replace(furthest, relative=max(relative)) if relative else furthest
