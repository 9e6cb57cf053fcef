"""A small GPT, for the two versions of the script beside it."""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of x's shape (batch, length, width)."""
        many, length, width = x.shape
        parts = self.attention(self.norms[0](x)).view(many, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(many, length, width))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int, block_size: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the characters that follow."""
        places = torch.arange(given.shape[1], device=given.device)
        x = self.blocks(self.characters(given) + self.places(places))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), wanted.flatten())
