import torch

import hotloop


@torch._dynamo.disable
def scaled(x):
    return x * 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return scaled(self.linear(x)) + 1  # here


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
