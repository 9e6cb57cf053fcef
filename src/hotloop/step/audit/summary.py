"""What surveys saw that concerns all steps of a loop, not one kind of call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.step.state.ambient import compute_dtype

if TYPE_CHECKING:
    import torch

    from hotloop.measure.limits import ComputeDtype
    from hotloop.step.audit.op_trace import Survey


class Surveyed:
    """Adds up what surveys saw.

    Attributes:
        looks: how many there were.
        draws_random: a step draws random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.looks, self.draws_random = 0, False
        self._device = device
        self._matrix_dtypes: set[torch.dtype] = set()

    def compute_dtype(self) -> ComputeDtype:
        """Name the narrowest dtype that matrix products were seen in, which sets how much rounding is honest."""
        return compute_dtype(self._matrix_dtypes, self._device)

    def add(self, seen: Survey) -> None:
        """Take note of what a survey saw that concerns all steps."""
        self.looks += 1
        self.draws_random |= seen.random_operations > 0
        self._matrix_dtypes |= seen.matrix_dtypes
