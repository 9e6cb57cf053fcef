import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):  # here
        return self.linear(x)


model = hotloop.compile(Model(), "aot_eager")
for deterministic in (False, True):
    torch.use_deterministic_algorithms(deterministic)
    model(torch.randn(4, 8)).sum().backward()
