"""The suite's own models, as people write them; the others come from torchvision, transformers, diffusers and peft.

They stand in a module of their own because a background compile rebuilds a model from its importable class.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom


class Scorer(nn.Module):
    """A stack of small encoder layers with a scalar head: many small kernels, so launches take most of its step."""

    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        """Return the loss of x [B, T, W]: scores are drawn to 0."""
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.head(x)).float().square().mean()


class Block(nn.Module):
    """Causal attention and an MLP, normalised before."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Return x [B, T, W] after the block."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A language model of GPT-2's shape that returns its loss, as nanoGPT does."""

    def __init__(self, words, width, layers, heads, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x, y):
        """Return the loss of tokens x and the next tokens y, both [B, T]."""
        hidden = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), y.flatten())


class Vit(nn.Module):
    """A vision transformer: patches, a class token, encoder layers that normalise first, a linear head."""

    def __init__(self, *, pixels, patch, width, layers, heads, classes):  # noqa: PLR0913 - a model's sizes
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, (pixels // patch) ** 2 + 1, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        """Return the scores [B, C] of images x [B, 3, H, W]."""
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x[:, 0]))


class Mlp(nn.Module):
    """Linear layers with normalisation, for points."""

    def __init__(self, width, layers, classes):
        super().__init__()
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
        self.net = nn.Sequential(*parts, nn.Linear(width, classes))

    def forward(self, x):
        """Return the scores [B, C] of points x [B, W]."""
        return self.net(x)


class ActorCritic(nn.Module):
    """An actor and a critic of two hidden layers each, as for PPO over continuous moves."""

    def __init__(self, seen, moves, width):
        super().__init__()
        self.actor, self.critic = self._net(seen, width, moves), self._net(seen, width, 1)
        self.log_deviation = nn.Parameter(torch.zeros(moves))

    @staticmethod
    def _net(seen, width, out):
        return nn.Sequential(
            nn.Linear(seen, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)
        )

    def forward(self, x):
        """Return mean and deviation of the moves [B, M], and the value [B], of what was observed [B, W]."""
        mean = self.actor(x)
        return mean, self.log_deviation.exp().expand_as(mean), self.critic(x).squeeze(-1)


class Vae(nn.Module):
    """A convolutional variational autoencoder of pictures of 64 x 64, with the layers of Burgess et al. (2018)."""

    def __init__(self, width, code):
        super().__init__()
        half, wide = width // 2, 8 * width
        self.encoder = nn.Sequential(
            nn.Conv2d(3, half, 4, 2, 1), nn.ReLU(), nn.Conv2d(half, half, 4, 2, 1), nn.ReLU(),
            nn.Conv2d(half, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(16 * width, wide), nn.ReLU(), nn.Linear(wide, 2 * code),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(code, wide), nn.ReLU(), nn.Linear(wide, 16 * width), nn.ReLU(), nn.Unflatten(1, (width, 4, 4)),
            nn.ConvTranspose2d(width, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, half, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(half, half, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(half, 3, 4, 2, 1),
        )  # fmt: skip

    def encode(self, x):
        """Return mean and log of the variance of the codes [B, C] of pictures [B, 3, 64, 64]."""
        return self.encoder(x).chunk(2, 1)


class Lstm(nn.Module):
    """A language model of LSTM layers with dropout, as torch's example of word_language_model."""

    def __init__(self, words, width, layers, dropout):
        super().__init__()
        self.drop, self.tokens = nn.Dropout(dropout), nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=dropout, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x, y):
        """Return the loss of tokens x and the next tokens y, both [B, T]."""
        hidden, _ = self.rnn(self.drop(self.tokens(x)))
        return F.cross_entropy(self.head(self.drop(hidden)).float().flatten(0, 1), y.flatten())
