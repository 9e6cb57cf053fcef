import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):  # here
        return self.linear(x)


model = hotloop.compile(Model(), "aot_eager")
for enabled in (False, True):
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        model(torch.randn(4, 8)).sum().backward()
