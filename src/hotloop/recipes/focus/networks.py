"""The three networks: a language model that reads a working context, a gist encoder, and a lens that scores slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotloop.recipes.focus.allocator import edit
from hotloop.recipes.focus.context import BLOCK, ITEMS, Frame, by_block, fill, lay_out

if TYPE_CHECKING:
    from hotloop.train.recipe_settings import FocusSettings


_NEVER = -1e4
"""For what cannot be: finite, so that where nothing can be, the gradient is 0 and not NaN."""


class Attention(nn.Module):
    """Multi-head attention.

    ``smeared``: a key is mixed with that of the slot before, by a learned share a head, so that one layer can look for
    "what came after this token before" (smeared keys: Olsson et al., In-context Learning and Induction Heads, 2022).
    """

    def __init__(self, width: int, heads: int, *, smeared: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.smear = nn.Parameter(torch.zeros(heads, 1, 1)) if smeared else None

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Attend: x (rows, slots, width); seen, bool (rows, 1, 1 or slots, slots), says which keys a query sees."""
        rows, slots, width = x.shape
        query, key, value = self.into(x).view(rows, slots, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.smear is not None:
            share = self.smear.sigmoid()
            key = key * (1 - share) + functional.pad(key, (0, 0, 1, -1)) * share
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        found: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, slots, width))
        return found


class Layer(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, smeared: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, smeared=smeared)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Pass x (rows, slots, width) on; seen as in `Attention`."""
        x = x + self.attention(self.first(x), seen)
        found: Tensor = x + self.feed(self.second(x))
        return found


class Reader(nn.Module):
    """A small GPT-2 that reads embeddings, those of a working context and of the tokens that follow it, and can copy.

    Where a slot stands in the text is told by two learned embeddings, of its block and of its place there, so that a
    gist and a far token keep their distance. Beside its vocabulary it points at tokens that it sees: at those which
    followed something like what it has just read (pointer sentinel mixture: Merity et al., 2016). Keys are smeared.
    """

    def __init__(self, vocabulary: int, settings: FocusSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.Embedding(settings.blocks + 1, width)
        self.places = nn.Embedding(ITEMS, width)
        self.layers = nn.ModuleList(Layer(width, settings.heads, smeared=True) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(width)
        self.likeness = nn.Linear(width, width, bias=False)
        self.sentinel = nn.Linear(width, 1)
        self.apply(_as_gpt2)
        nn.init.orthogonal_(self.likeness.weight)
        nn.init.constant_(self.sentinel.bias, 8.0)  # it begins by its vocabulary, and learns when to copy

    def place(self, block: Tensor, place: Tensor) -> Tensor:
        """Return what tells where slots stand; (rows, slots) twice to (rows, slots, width)."""
        where: Tensor = self.blocks(block) + self.places(place)
        return where

    def everywhere(self) -> Tensor:
        """Return what tells where each item of a text stands, by its number in a layout: (blocks x ITEMS, width)."""
        return (self.blocks.weight[:-1].unsqueeze(1) + self.places.weight).flatten(0, 1)

    def forward(self, x: Tensor, taken: Tensor, tokens: Tensor, following: Tensor) -> Tensor:
        """Return the cross-entropy of what follows each slot, in nats.

        Args:
            x: (rows, slots, width).
            taken: (rows, slots), bool; no slot sees an empty one.
            tokens: (rows, slots), int64: the token of each slot, -1 where there is none to copy.
            following: (rows, slots), int64: the token that follows each slot.

        Returns:
            (rows, slots), float32.
        """
        slots = x.shape[1]
        before = torch.ones(slots, slots, dtype=torch.bool, device=x.device).tril()
        itself = torch.eye(slots, dtype=torch.bool, device=x.device)  # an empty slot has to see something
        seen = (before & taken[:, None, None, :]) | itself
        for layer in self.layers:
            x = layer(x, seen)
        x = self.norm(x)
        # Flat: with its classes in the middle, torch would first copy the logits, by far the largest tensor of a step.
        logits = functional.linear(x, self.tokens.weight).float().flatten(0, 1)
        written = functional.cross_entropy(logits, following.flatten(), reduction="none").view_as(following)
        like = self.likeness(x)
        after = functional.pad(like, (0, 0, 1, -1))  # a token is pointed at by what came before it
        points = (like @ after.transpose(1, 2)).float() / x.shape[-1] ** 0.5
        points = points.masked_fill(~(before & (tokens >= 0).unsqueeze(1)), _NEVER)
        sentinel = self.sentinel(x).float()
        whole = torch.cat([points, sentinel], -1).logsumexp(-1)
        right = points.masked_fill(tokens.unsqueeze(1) != following.unsqueeze(2), _NEVER)
        return whole - torch.logaddexp(sentinel.squeeze(-1) - written, right.logsumexp(-1))


class Gist(nn.Module):
    """Sums up blocks of token embeddings: their mean, and what learned weights make of them."""

    def __init__(self, settings: FocusSettings) -> None:
        super().__init__()
        width = settings.hidden_size
        self.places = nn.Parameter(torch.zeros(BLOCK, width))
        self.norm = nn.LayerNorm(width)
        self.weigh = nn.Linear(width, settings.heads)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.apply(_as_gpt2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return gists: (rows, BLOCK, width) to (rows, width)."""
        x = self.norm(tokens + self.places)
        weights = self.weigh(x).softmax(1)
        value = self.value(x).unflatten(-1, (weights.shape[-1], -1))
        mixed = (weights.unsqueeze(-1) * value).sum(1).flatten(1)
        found: Tensor = tokens.mean(1) + self.out(functional.gelu(mixed))
        return found


class Lens(nn.Module):
    """Scores each slot of a working context: positive asks to expand a gist, negative to collapse a block.

    Besides what its layers make of a slot, it sees how well the slot goes with the newest tokens, head by head.
    """

    def __init__(self, settings: FocusSettings) -> None:
        super().__init__()
        width, self.heads, self.frame = settings.lens_size, settings.heads, Frame.of(settings)
        self.into = nn.Linear(settings.hidden_size, width)
        self.layers = nn.ModuleList(Layer(width, settings.heads) for _ in range(settings.lens_layers))
        self.norm = nn.LayerNorm(width)
        self.score = nn.Linear(width, 1)
        self.first = nn.LayerNorm(settings.hidden_size)
        self.slot, self.newest = (nn.Linear(settings.hidden_size, settings.hidden_size) for _ in range(2))
        self.weigh = nn.Parameter(torch.ones(settings.heads) / settings.heads)
        self.apply(_as_gpt2)
        nn.init.orthogonal_(self.slot.weight)
        self.newest.weight.data.copy_(self.slot.weight.data)

    def forward(
        self, tokens: Tensor, gists: Tensor, where: Tensor, expanded: Tensor, edits: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Look at working contexts: score their slots, and do the best few edits that the scores ask for.

        All that a round of the allocator takes is in here, and nothing in here waits for a value: where the lens is
        compiled, the round is one piece, and under CUDA graphs one launch instead of some hundred small ones.

        Args:
            tokens: (texts, blocks x BLOCK, width).
            gists: (texts, blocks, width).
            where: `Reader.everywhere`.
            expanded: several contexts of each text: (texts x contexts, blocks).
            edits: of a context, at most.

        Returns:
            the score of each slot, (texts x contexts, budget), and the contexts after the edits.
        """
        layout = lay_out(expanded, self.frame)
        context = fill(layout, tokens, gists) + where[layout.item]
        scores = self.scores(context, layout.taken, layout.share)
        if edits:
            expanded = edit(expanded, by_block(scores.float(), layout, self.frame.blocks), self.frame, edits)
        return scores, expanded

    def scores(self, x: Tensor, taken: Tensor, share: Tensor) -> Tensor:
        """Return scores from -1 to 1, tanh of how far a slot is above the mean of the blocks that may be edited.

        A preference tells differences only, so where their zero lies has to be said: at that mean.

        Args:
            x: (rows, slots, width).
            taken: (rows, slots), bool.
            share: (rows, slots), the share of a slot in its block's score, 0 for those of protected blocks.

        Returns:
            (rows, slots).
        """
        raw = self.matches(x, taken & (share == 0))
        x = self.into(x)
        for layer in self.layers:
            x = layer(x, taken[:, None, None, :])
        raw = raw + self.score(self.norm(x)).squeeze(-1)
        middle = (raw * share).sum(-1, keepdim=True) / share.sum(-1, keepdim=True)
        return torch.tanh(raw - middle)

    def matches(self, x: Tensor, newest: Tensor) -> Tensor:
        """Return how well each slot goes with the newest: the smooth maximum of its products with them, by head."""
        rows, slots, width = x.shape
        x = self.first(x)
        query, key = (one(x).view(rows, slots, self.heads, -1).transpose(1, 2) for one in (self.slot, self.newest))
        products = (query @ key.transpose(2, 3)).float() / (width // self.heads) ** 0.5
        found = products.masked_fill(~newest[:, None, None, :], _NEVER).logsumexp(-1)
        matched: Tensor = (found * self.weigh.view(-1, 1)).sum(1)
        return matched


def _as_gpt2(module: nn.Module) -> None:
    """Set weights as GPT-2 does: normal with a deviation of 0.02, biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
