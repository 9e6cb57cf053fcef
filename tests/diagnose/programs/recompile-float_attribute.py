import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.scale = 1.5

    def forward(self, x):
        return self.linear(x) * self.scale  # here


model = hotloop.compile(Model(), "aot_eager")
for scale in (1.5, 2.5, 3.5):
    model.scale = scale
    model(torch.randn(4, 8)).sum().backward()
