import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, double):
        return self.linear(x) * 2 if double else self.linear(x)  # here


model = hotloop.compile(Model(), "aot_eager")
for double in (False, True):
    model(torch.randn(4, 8), double).sum().backward()
