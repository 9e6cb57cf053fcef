"""What several recipes need of networks: the logits alone, weights that are their own, a size in words."""

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


def align(net: nn.Module) -> None:
    """Copy the weights out of the file that they are mapped from, where they begin at any byte.

    Kernels round otherwise on unaligned memory, and a resumed run, whose weights lie in torch's own, would differ.
    """
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


def count(number: int) -> str:
    """Say how many parameters: 22.7M, 16.1k, 12."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
