import torch

import hotloop


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

    def loss(self, x):
        return self.forward(x).sum()


model = hotloop.compile(Model(), "aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model.loss(torch.randn(4, 8)).backward()
    optimizer.step()
