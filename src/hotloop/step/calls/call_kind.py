"""One way to call a step: its argument shapes and values, and what was recorded, proven or declined for it."""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING

from hotloop.step.prove import proof
from hotloop.step.state.ambient import ambient_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    import torch

    from hotloop.measure import Difference, Signature
    from hotloop.step.audit.op_trace import Survey
    from hotloop.step.calls.aliasing import Aliasing
    from hotloop.step.capture.invariants import Invariants
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.prove.outcomes import Outcome

DROPS, WITHIN = 3, 24
"""A recording that is dropped so often within so many steps is not made again."""


SPREADS, _EXACT = 4, 2
"""How often a step is run twice, at most: kernels that are not deterministic differ at one step and not at another.
And how often where it repeats itself exactly, which once may be luck."""


@dataclasses.dataclass
class Variant:
    """What is known about calls with one key, ``inputs`` being the arguments' part of it."""

    key: Hashable
    inputs: Signature
    reports_capturing: bool = False
    """What code of the step hears that asks whether a capture is going on: no, so that a recording is of the path that
    eager takes, unless that one cannot be captured, or compiled code is of the other."""
    calls: int = 0
    called: int = 0
    """The number of the last call, among all of the step."""
    seen: Survey | None = None
    own_path: bool = False
    """While it is captured, code of the step takes another path, on which it draws other random numbers."""
    spread: dict[str, Difference] | None = None
    measured: list[dict[str, Difference]] = dataclasses.field(default_factory=list)
    """Every time that the step was run twice to see how far it is from itself."""
    noisy: bool = False
    """Whether kernels of the step were seen to differ from run to run, in this run of the program or an earlier one."""
    standing: Invariants | None = None
    captured: CapturedStep | None = None
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    """Of the proof steps of what is captured, without what the steps returned."""
    proven: bool = False
    declined: Obstacle | None = None
    drops: collections.deque[tuple[int, str]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=DROPS)
    )

    @property
    def begun(self) -> bool:
        """Tell whether it is on its way to be captured, or is captured."""
        return bool(self.measured) or self.captured is not None

    @property
    def steps_left(self) -> int:
        """Give the calls that it takes until it is proven, as far as none differs: a look, a warm-up, the proof."""
        first = (self.seen is None) + (self.spread is None)
        return max(1, first + proof.STEPS - len(self.outcomes))

    def forget(self) -> None:
        """Begin anew, with a survey."""
        self.captured, self.seen, self.spread, self.standing = None, None, None, None
        self.proven = self.noisy = False
        self.outcomes.clear()
        self.measured.clear()

    def other_path(self) -> bool:
        """Begin anew on the path of code that hears that it is captured; False where there is none, or it is this one.

        transformers reads a padding mask on the host to leave it out, unless it is captured.
        """
        if self.reports_capturing or self.seen is None or not self.seen.asked:
            return False
        self.reports_capturing = True
        self.forget()
        return True

    @property
    def updated(self) -> set[str]:
        """Parameters that a recording is judged by its own gradients in: where two runs may find others."""
        return self.seen.updated if self.seen is not None and self.noisy else set()

    def note_spread(self, found: dict[str, Difference], earlier: dict[str, Difference] | None = None) -> None:
        """Take note of how far the step is from itself: of each tensor, the furthest yet, as such and beside its size.

        Args:
            found: how far two runs of the step were apart just now.
            earlier: how far earlier runs of the program were, which gets what is noted now.
        """
        self.measured.append(found)
        known = [*self.measured, *([earlier] if earlier else [])]
        self.spread = {
            name: _furthest([one[name] for one in known if name in one])
            for name in dict.fromkeys(name for one in self.measured for name in one)
        }
        noisy = any(one.rms_difference > 0 for one in self.spread.values())
        if noisy and not self.noisy:
            self.outcomes.clear()  # they hold the optimizer against other gradients
        self.noisy = noisy
        if self.proven:  # a sentinel's: kept as one, for there may be many in a long run
            self.measured = [self.spread]
        if earlier is not None:
            earlier.update(self.spread)

    def measure_again(self) -> bool:
        """Have the step run twice once more before it is judged; False where that would tell nothing new.

        A step that has repeated itself exactly twice will do so again; one whose kernels were seen to differ from run
        to run may differ more than it did, yet it is not measured for ever.
        """
        if len(self.measured) >= (SPREADS if self.noisy else _EXACT):
            return False
        self.spread = None
        return True

    def drop(self, step: int, reason: str) -> bool:
        """Forget the recording; True where it has been dropped too often lately."""
        self.forget()
        self.drops.append((step, reason))
        return len(self.drops) == DROPS and step - self.drops[0][0] <= WITHIN

    def decline(self, obstacle: Obstacle) -> None:
        """Never capture it."""
        self.captured, self.declined = None, obstacle


def _furthest(found: list[Difference]) -> Difference:
    if len(found) == 1:
        return found[0]
    furthest = max(found, key=lambda one: one.rms_difference)
    relative = [one.relative for one in found if one.relative is not None]
    return dataclasses.replace(furthest, relative=max(relative)) if relative else furthest


class Keys:
    """Makes the key of a call: what a recording freezes and no look at the program before a replay would tell.

    Args:
        parameters: gives the parameters whose gradients a step finds.
        modules: gives the modules whose mode it finds.
    """

    def __init__(
        self, parameters: Callable[[], list[torch.nn.Parameter]], modules: Callable[[], list[torch.nn.Module]]
    ) -> None:
        self._parameters, self._modules = parameters, modules

    def of(self, inputs: Signature, apart: Aliasing) -> Hashable:
        """Give the key of the coming call: arguments, gradients that exist, modes of modules, torch's own modes."""
        gradients = tuple([parameter.grad is None for parameter in self._parameters()])
        modes = tuple([module.training for module in self._modules()])
        return inputs, apart, gradients, modes, ambient_modes()
