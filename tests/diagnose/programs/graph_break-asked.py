import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        torch._dynamo.graph_break()  # here
        return y * 2


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
