"""What two hundred small training programs are made of: networks, optimizers, precisions, and batches."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

WIDTH, CLASSES, ROWS = 16, 5, 8


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):  # noqa: D102
        return self.function(x)


class Residual(nn.Module):
    """A convolution with BatchNorm around which its input goes."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):  # noqa: D102
        return F.relu(x + self.inner(x))


class Attention(nn.Module):
    """Causal attention with a residual; the bias of its keys has a gradient of rounding alone."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # noqa: D102
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Recurrent(nn.Module):
    """The last output of a recurrent network."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True, **settings)
        self.out = nn.Linear(WIDTH * (2 if settings.get("bidirectional") else 1), WIDTH)

    def forward(self, x):  # noqa: D102
        return self.out(self.cells(x)[0][:, -1])


class GraphNetwork(nn.Module):
    """Two rounds of messages on the fixed graph of a ring."""

    def __init__(self):
        super().__init__()
        ring = torch.eye(6) + torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)
        self.register_buffer("adjacency", ring / 3)
        self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x):  # noqa: D102
        return self.second(self.adjacency @ F.elu(self.first(self.adjacency @ x))).mean(1)


def _encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Lambda(lambda x: x.mean(1)))


def _pooled(*layers, last):
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, WIDTH))


FLAT, PICTURE, SEQUENCE = (12,), (3, 8, 8), (6, WIDTH)
NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, WIDTH)), FLAT),
    "mlp-batchnorm": (
        lambda: nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH)),
        FLAT,
    ),
    "convolutions": (
        lambda: _pooled(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.LeakyReLU(0.2)),
            *(nn.Conv2d(8, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2)),
            last=16,
        ),
        PICTURE,
    ),
    "residual": (
        lambda: _pooled(nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8), nn.MaxPool2d(2), Residual(8), last=8),
        PICTURE,
    ),
    "groupnorm": (
        lambda: _pooled(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, groups=8), last=8),
        PICTURE,
    ),
    "encoder": (_encoder, SEQUENCE),
    "causal": (lambda: nn.Sequential(Attention(WIDTH), Attention(WIDTH), Lambda(lambda x: x[:, -1])), SEQUENCE),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.1), SEQUENCE),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), SEQUENCE),
    "graph": (GraphNetwork, SEQUENCE),
}
OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-3),
    "adam-fast": lambda ps: torch.optim.Adam(ps, lr=1e-2, betas=(0.5, 0.999)),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=3e-4, weight_decay=0.1),
    "adamw-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-3, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd-nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=2e-4, fused=True),
}
PRECISIONS = ("float32", "float32", "bf16-autocast", "float32", "bf16", "float64", "float32")


class Program:
    """One program: makes its parts, and says what a step is called with.

    Args:
        network: a key of ``NETWORKS``.
        optimizer: a key of ``OPTIMIZERS``.
        precision: one of ``PRECISIONS``.
        seed: of weights and batches.
    """

    def __init__(self, network, optimizer, precision, seed):
        torch.manual_seed(seed)
        self._network, self.shape = NETWORKS[network]
        self._optimizer = OPTIMIZERS[optimizer]
        self.dtype = {"bf16": torch.bfloat16, "float64": torch.float64}.get(precision, torch.float32)
        self._amp = precision == "bf16-autocast"
        self.draws = torch.Generator().manual_seed(100 + seed)

    def net(self):
        """Return the network."""
        return self._network().to(self.dtype)

    def head(self, outputs=CLASSES, inputs=WIDTH):
        """Return a linear layer on the network."""
        return nn.Linear(inputs, outputs).to(self.dtype)

    def to_input(self):
        """Return a network from noise to what a network takes."""
        size = math.prod(self.shape)
        layers = (nn.Linear(4, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, size), nn.Unflatten(1, self.shape))
        return nn.Sequential(*layers).to(self.dtype)

    def optimizer(self, *modules):
        """Return an optimizer of the parameters of modules."""
        return self._optimizer([one for module in modules for one in module.parameters() if one.requires_grad])

    def amp(self):
        """Return the precision's autocast."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._amp)

    def x(self):
        """Draw the input of a network."""
        return torch.randn(ROWS, *self.shape, generator=self.draws).to(self.dtype)

    def noise(self, *shape):
        """Draw normal numbers."""
        return torch.randn(*(shape or (ROWS, 4)), generator=self.draws).to(self.dtype)

    def labels(self, most=CLASSES):
        """Draw classes."""
        return torch.randint(most, (ROWS,), generator=self.draws)

    def coins(self):
        """Draw zeros and ones."""
        return torch.randint(2, (ROWS,), generator=self.draws).to(self.dtype)
