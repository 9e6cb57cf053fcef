import contextlib

import torch

import hotloop
from hotloop._torch import backends
from hotloop.errors import CompiledRunError

# A compiler's mistake, planted: what it compiles fails when it runs.
kernel = {}
exec(compile("def run(*args): raise RuntimeError('a kernel failed')", "<kernel>", "exec"), kernel)
backends.aot_eager = lambda: lambda graph, inputs: kernel["run"]


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()  # here


model = hotloop.compile(Model(), "aot_eager")
with contextlib.suppress(CompiledRunError):
    model(torch.randn(4, 8)).sum().backward()
