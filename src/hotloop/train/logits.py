"""A transformers model as a module that gives its logits alone."""

from __future__ import annotations

from torch import Tensor, nn


class Logits(nn.Module):
    """Gives the first output of a transformers model.

    ``net`` is the transformers model itself: the component that is compiled, and what ``save_pretrained`` belongs to.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Tensor) -> Tensor:
        """Return the logits of inputs by name."""
        logits: Tensor = self.net(**inputs, return_dict=False)[0]
        return logits
