"""A network of repeated blocks with dropout, for programs that run in several processes."""

from torch import nn


class Block(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.into, self.drop, self.out, self.scale = nn.Linear(width, 7), nn.Dropout(0.25), nn.Linear(7, width), 1.0

    def forward(self, x):
        return x + self.out(self.drop(self.into(x).relu())) * self.scale


class Blocks(nn.Module):
    """Layers of its own, which run eager where blocks are compiled, around three blocks."""

    def __init__(self, outputs=1):
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, outputs)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
