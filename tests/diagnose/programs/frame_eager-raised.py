import contextlib

import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        if len(x) > 4:
            raise ValueError("at most 4 rows")  # here
        return self.linear(x)


model = hotloop.compile(Model(), "aot_eager")
for _ in range(8):
    with contextlib.suppress(ValueError):
        model(torch.randn(8, 8))
