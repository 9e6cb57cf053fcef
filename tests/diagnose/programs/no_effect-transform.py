import torch

import hotloop


def loss(x):
    return x.square().sum()


model = hotloop.compile(loss, "aot_eager")
torch.func.grad(model)(torch.ones(4))
