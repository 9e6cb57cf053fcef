"""Copies many tensors in few launches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Sequence


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in place and without gradients; shapes must match, devices may differ."""
    if not targets:
        return
    with torch.no_grad():
        try:
            private("torch:_foreach_copy_")(list(targets), list(sources), non_blocking=False)
        except CapabilityMissingError:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
