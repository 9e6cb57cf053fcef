import torch

import hotloop

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hotloop.testing.captured_step_emulation(), hotloop.Loop(model, optimizer, run="eager+graph") as loop:

    @loop.step
    def train_step(x):
        loss = model(x).square().mean()
        if loss.item() > 100:  # here
            loss = loss * 0.5
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(8):
        train_step(torch.randn(4, 8))
