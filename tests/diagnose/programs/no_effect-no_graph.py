import torch

import hotloop


class Model(torch.nn.Module):
    def forward(self, x):
        return x


model = hotloop.compile(Model(), "aot_eager")
model(torch.randn(4, 8))
