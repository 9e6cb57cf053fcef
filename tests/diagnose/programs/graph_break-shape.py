import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        return y[y > 0]  # here


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
