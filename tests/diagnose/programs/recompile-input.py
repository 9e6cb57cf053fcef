import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):  # here
        return self.linear(x)


model = hotloop.compile(Model(), "aot_eager")
x = torch.randn(8, 8)
for rows in (x, x.t()):
    model(rows).sum().backward()
