import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:  # here
            return y * 2
        return y


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
