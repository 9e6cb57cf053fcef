import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.seen = []

    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.detach())  # here
        return y + sum(self.seen)


model = hotloop.compile(Model(), "aot_eager")
for _ in range(4):
    model(torch.randn(4, 8)).sum().backward()
