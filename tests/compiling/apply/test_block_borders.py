"""Values that cross the borders of blocks: changed in place, viewed, aliased."""

import pytest
import torch
import torch.nn.functional as F
from compiling_models import Stack, against_eager, part, rows
from torch import nn


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("mutates its input", lambda s, x: s.inner(x.mul_(2.0))),
        ("mutates a view of its input", lambda s, x: (x[:, :4].add_(1.0), s.inner(x))[1]),
        ("returns a view", lambda s, x: s.inner(x).view(2, -1, 8).view(-1, 8)),
        ("returns its input", lambda s, x: x if s.inner.in_features == 0 else (s.inner(x), x)[1] + 0 * s.inner(x)),
        ("relu in place", lambda s, x: F.relu(s.inner(x), inplace=True)),
        ("relu in place on its input", lambda s, x: s.inner(F.relu(x, inplace=True))),
        ("writes an index", lambda s, x: s.inner(x).index_fill_(0, torch.tensor([0]), 0.0)),
        ("keeps a transposed result", lambda s, x: s.inner(x).t().contiguous().t()),
    ],
)
def test_in_place_operations_and_views_across_borders(name, body):
    block = part(body)
    # A gradient that comes in transposed is summed in another order across a border.
    rounding = {"rtol": 1e-5, "atol": 1e-6} if "transposed" in name else None
    status = against_eager(
        Stack(block(), block(), block()), [rows(seed=s) for s in range(3)], tolerance=rounding, regions="blocks"
    )
    assert status.state == "compiled", status.causes


def test_equal_blocks_whose_inputs_alias_and_do_not():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8))

        def forward(self, x, y):
            x.mul_(2.0)
            return self.inner(x + y)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.last = nn.ModuleList([Pair(), Pair()]), nn.Linear(8, 8)

        def forward(self, x):
            base = x * 3.0
            a = self.blocks[0](base.view(4, 8), (x * 3.0).view(4, 8))
            b = self.blocks[1](base.view(4, 8), base.view(4, 8))
            return self.last(a) + b

    status = against_eager(Model(), [rows().requires_grad_()] * 2, regions="blocks")
    assert status.state == "compiled", status.causes
