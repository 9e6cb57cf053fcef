import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.act = torch.nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x))  # here


model = hotloop.compile(Model(), "aot_eager")
for act in (torch.nn.ReLU(), torch.nn.GELU()):
    model.act = act
    model(torch.randn(4, 8)).sum().backward()
