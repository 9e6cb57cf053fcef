import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.step = 1

    def forward(self, x):
        return self.linear(x) * self.step  # here


model = hotloop.compile(Model(), "aot_eager")
for step in range(1, 5):
    model.step = step
    model(torch.randn(4, 8)).sum().backward()
