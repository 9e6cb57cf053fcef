import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.linear(x))  # here


model = hotloop.compile(Model(), "aot_eager")
for p in (0.1, 0.2, 0.3):
    model.dropout.p = p
    model(torch.randn(4, 8)).sum().backward()
