"""The working context: a text in blocks, each of which is there as its tokens (expanded) or as its gist (collapsed).

What a working context is, is one bool a block, ``expanded`` of shape (rows, blocks). Everything else follows from it by
tensor operations of fixed shapes that wait for nothing, so that a step that lays contexts out can be captured.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from hotloop.train.recipe_settings import FocusSettings

BLOCK = 32
"""Tokens of a block, which a gist stands for."""
ITEMS = BLOCK + 1
"""What there is of a block to show: its tokens, and its gist behind them."""


@dataclasses.dataclass(frozen=True)
class Frame:
    """The sizes of a working context.

    Args:
        blocks: of the text that is read.
        budget: slots of the working context, each for a token or a gist.
        protected: newest blocks, which stay expanded.

    Raises:
        ConfigError: the budget has no room for the protected blocks and a gist of each other block.
    """

    blocks: int
    budget: int
    protected: int

    def __post_init__(self) -> None:
        if self.protected >= self.blocks:
            raise ConfigError(
                f"focus.protected={self.protected}: expected fewer than focus.blocks={self.blocks}, or nothing is left "
                "to choose from"
            )
        if self.budget < self.least + BLOCK - 1:
            raise ConfigError(
                f"focus.budget={self.budget}: expected at least {self.least + BLOCK - 1} with focus.blocks="
                f"{self.blocks} and focus.protected={self.protected}: {BLOCK} slots for each protected block, one for "
                "the gist of each other block, and room to expand one of them"
            )

    @classmethod
    def of(cls, settings: FocusSettings) -> Frame:
        """Return the sizes that the settings ask for."""
        return cls(settings.blocks, settings.budget, settings.protected)

    @property
    def least(self) -> int:
        """Slots that are taken where every block that may be collapsed is."""
        return self.protected * BLOCK + self.blocks - self.protected

    @property
    def most(self) -> int:
        """How many blocks can be expanded, the protected ones among them."""
        return min((self.budget - self.blocks) // (BLOCK - 1), self.blocks)

    @property
    def room(self) -> int:
        """How many blocks can be expanded besides the protected ones."""
        return self.most - self.protected

    def slots(self, expanded: Tensor) -> Tensor:
        """Count the slots that contexts of shape (rows, blocks) take; shape (rows,)."""
        return self.blocks + (BLOCK - 1) * expanded.sum(-1)

    def newest(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return contexts in which the newest blocks are expanded, as many as there is room for: (rows, blocks)."""
        expanded = torch.arange(self.blocks, device=device) >= self.blocks - self.protected - self.room
        return expanded.expand(rows, -1).clone()

    def drawn(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return contexts in which random blocks are expanded, as many as there is room for: (rows, blocks)."""
        far = self.blocks - self.protected
        chosen = torch.rand(rows, far).topk(self.room, dim=-1).indices  # on the host, the same on any device
        expanded = torch.ones(rows, self.blocks, dtype=torch.bool)
        expanded[:, :far] = torch.zeros(rows, far, dtype=torch.bool).scatter(1, chosen, value=True)
        return expanded.to(device)

    def exchanged(self, rows: int, device: torch.device | None = None) -> Tensor:
        """Return `newest` contexts in which one block, drawn at random, has given way to another: (rows, blocks).

        Where there is room for all blocks, there is none to exchange.
        """
        expanded, far = self.newest(rows), self.blocks - self.protected
        if self.room < far:
            going = torch.randint(far - self.room, far, (rows, 1))
            coming = torch.randint(0, far - self.room, (rows, 1))
            expanded = expanded.scatter(1, going, value=False).scatter(1, coming, value=True)
        return expanded.to(device)


class Layout(NamedTuple):
    """What stands in each slot of working contexts; every tensor has the shape (rows, budget).

    Slots are in the order of the text and end with its last token; what is left of the budget comes first, empty.

    ``item``: the number of what stands there, of all that the text has: of each block its tokens, and then its gist.
    ``block``: the number of its block. ``place``: that of the token in its block, or `BLOCK` for a gist. ``taken``:
    whether anything stands there. ``share``: its share in the score of its block, 0 where the block is protected.
    """

    item: Tensor
    block: Tensor
    place: Tensor
    taken: Tensor
    share: Tensor


def lay_out(expanded: Tensor, frame: Frame) -> Layout:
    """Lay working contexts out.

    Args:
        expanded: (rows, blocks), within the budget.
        frame: their sizes.
    """
    whole = expanded.unsqueeze(-1)
    shown = torch.cat([whole.expand(-1, -1, BLOCK), ~whole], -1).flatten(1)  # of each item, whether it has a slot
    counts = shown.cumsum(-1)
    number = torch.arange(1 - frame.budget, 1, device=expanded.device) + counts[:, -1:]
    taken = number > 0
    item = torch.searchsorted(counts, number.clamp(min=1))
    block, place = item // ITEMS, item % ITEMS
    width = (place < BLOCK) * (BLOCK - 1) + 1  # of its block
    share = (taken & (block < frame.blocks - frame.protected)) / width
    return Layout(item, block, place, taken, share)


def fill(layout: Layout, tokens: Tensor, gists: Tensor) -> Tensor:
    """Put embeddings into the slots of a layout.

    Args:
        layout: of several contexts of each text: shapes (texts x contexts, budget).
        tokens: (texts, blocks x BLOCK, width).
        gists: (texts, blocks, width).

    Returns:
        (texts x contexts, budget, width); empty slots hold the first token.
    """
    texts, _, width = tokens.shape
    items = torch.cat([tokens.reshape(texts, -1, BLOCK, width), gists.unsqueeze(2)], 2).flatten(1, 2)
    at = (layout.item * layout.taken).view(texts, -1, 1).expand(-1, -1, width)
    return items.gather(1, at).view(*layout.item.shape, width)


def by_block(scores: Tensor, layout: Layout, blocks: int) -> Tensor:
    """Return the score of each block, the mean of its slots: (rows, budget) to (rows, blocks); 0 where protected."""
    zeros = scores.new_zeros(scores.shape[0], blocks)
    return zeros.scatter_add(1, layout.block, scores * layout.share)
