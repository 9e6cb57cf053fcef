import os

import torch

import hotloop

os.environ["CXX"] = "no-such-compiler"

model = hotloop.compile(torch.nn.Linear(8, 8), "default")
model(torch.randn(4, 8)).sum().backward()
