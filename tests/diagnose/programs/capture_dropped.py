import torch

import hotloop

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hotloop.testing.captured_step_emulation(), hotloop.Loop(model, optimizer, run="eager+graph") as loop:

    @loop.step
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(40):
        if number in (12, 26):
            optimizer.param_groups[0]["weight_decay"] = number / 1e4
        train_step(torch.randn(4, 8))
