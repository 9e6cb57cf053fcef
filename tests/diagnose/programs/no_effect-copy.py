import copy

import torch

import hotloop

model = copy.deepcopy(hotloop.compile(torch.nn.Linear(8, 8), "aot_eager"))
model(torch.randn(4, 8)).sum().backward()
