"""Which memory tensors have, whatever names lead to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Give the memory that a tensor has now, without gradients: a later ``tensor.data = other`` leaves it as it is.

    A sparse tensor has several, and is given itself.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Give where the memory of each begins; 0 of a sparse tensor, and of one that is spread over processes."""
    return [one.data_ptr() if one.layout == torch.strided else 0 for one in tensors]


class Memory:
    """Which memory tensors have: ``tensor.data = other`` gives a tensor other memory, and neither counts as a write.

    Args:
        tensors: the objects that the program knows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._at = list(tensors), addresses(tensors)
        self._had = [in_place(one) for one in tensors]

    def moved(self) -> list[int]:
        """Give the places of the tensors that have another memory now."""
        now = addresses(self._tensors)
        return [] if now == self._at else [place for place, at in enumerate(self._at) if now[place] != at]

    def restore(self) -> None:
        """Give each the memory that it had; what is in it is not touched."""
        for place in self.moved():
            self._tensors[place].data = self._had[place]

    def bring_back(self) -> None:
        """Give each the memory that it had, with what the tensor holds now."""
        for place in self.moved():
            tensor, had = self._tensors[place], self._had[place]
            had.copy_(tensor.detach())
            tensor.data = had
