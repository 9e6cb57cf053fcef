import torch

import hotloop

model = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])
hotloop.compile(model, "aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(4, 8)
    for layer in model:
        x = layer(x)
    x.sum().backward()
    optimizer.step()
