import torch

import hotloop
from hotloop._torch import backends

# A compiler's mistake, planted: compiled code fails at its 12th call.
aot_eager, calls, kernel = backends.aot_eager(), [], {}
exec(compile("def run(*args): raise RuntimeError('a kernel failed')", "<kernel>", "exec"), kernel)


def fails_later(graph, inputs):
    compiled = aot_eager(graph, inputs)

    def run(*args):
        calls.append(1)
        return (kernel["run"] if len(calls) == 12 else compiled)(*args)

    return run


backends.aot_eager = lambda: fails_later

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with hotloop.Loop(model, optimizer, run="aot_eager") as loop:

    @loop.step
    def train_step(x):
        loss = model(x).square().mean()  # here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(16):
        train_step(torch.randn(4, 8))
