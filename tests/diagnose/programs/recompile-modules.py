import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

    def forward(self, x):  # here
        for layer in self.layers:
            x = layer(x)
        return x


model = hotloop.compile(Model(), "aot_eager")
for number in range(3):
    if number == 2:
        model.layers.append(torch.nn.Linear(8, 8))
    model(torch.randn(4, 8)).sum().backward()
