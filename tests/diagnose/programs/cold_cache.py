import os
import tempfile

import torch

import hotloop

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # a folder that does not outlive the run

model = hotloop.compile(torch.nn.Linear(8, 8), "default")
model(torch.randn(4, 8)).sum().backward()
starts = 2  # the run was started before, and did the same
