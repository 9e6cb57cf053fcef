import torch

import hotloop
from hotloop._torch import backends


def broken(graph, inputs):  # a compiler's failure, planted
    raise NotImplementedError("no kernel for relu")


backends.aot_eager = lambda: broken


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()  # here


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
