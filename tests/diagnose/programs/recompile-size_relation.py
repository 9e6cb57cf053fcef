import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y * 2 if len(y) > 16 else y  # here


model = hotloop.compile(Model(), "aot_eager", dynamic=True)
for size in (4, 5, 32):
    model(torch.randn(size, 8)).sum().backward()
