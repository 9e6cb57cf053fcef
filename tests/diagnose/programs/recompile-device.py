import torch

import hotloop


def scaled(x):  # here
    return x * 2


compiled = hotloop.compile(scaled, "aot_eager")
for device in ("cpu", "meta"):
    compiled(torch.ones(4, device=device))
