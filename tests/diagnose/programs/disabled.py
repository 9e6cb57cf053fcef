import os

import torch

import hotloop

os.environ["HOTLOOP_DISABLE"] = "1"
model = hotloop.compile(torch.nn.Linear(8, 8), "aot_eager")
model(torch.randn(4, 8)).sum().backward()
