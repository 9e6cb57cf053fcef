"""Questions that torch's own code asks the host in every step, and whose answer stays the same while steps go on.

`torch.optim.swa_utils.AveragedModel` asks at each update whether it has averaged anything yet. Once it has, it always
has: the answer is given without waiting for the device, so that a step which updates an average can be captured. A
program that sets the count back to 0 between two steps has to make a new `AveragedModel` instead.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_COUNT = "n_averaged"


class _Positive(torch.Tensor):
    """A count on the device that is known to be above 0: compared with 0 it answers at once."""

    __hash__ = torch.Tensor.__hash__

    def __eq__(self, other: object) -> Any:
        return False if _is_zero(other) else super().__eq__(other)

    def __gt__(self, other: Any) -> Any:
        return True if _is_zero(other) else super().__gt__(other)


def _is_zero(other: object) -> bool:
    return type(other) is int and other == 0


@contextlib.contextmanager
def answered(roots: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Let averages of weights know in the block that they have begun; reads their counts once, before it."""
    averages = [one for root in roots.values() for one in root.modules() if isinstance(one, AveragedModel)]
    begun = [(vars(one)["_buffers"], one.n_averaged) for one in averages if int(one.n_averaged) > 0]
    for held, count in begun:
        held[_COUNT] = count.as_subclass(_Positive)
    try:
        yield
    finally:
        for held, count in begun:
            held[_COUNT] = count
