"""A user's program: train torchvision's InceptionV3, with its auxiliary head, on images of 512 by 512; for a GPU.

The images are noise, since only the speed of a step is of interest here.
"""

import torch
from torch.nn import functional as F
from torchvision.models import inception_v3

import hotloop

SIZE, ROWS, CLASSES = 512, 16, 1000


def make() -> hotloop.Workload:
    """Give the program with fresh weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = inception_v3(init_weights=False).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits, auxiliary = model(images)
            loss = F.cross_entropy(logits, labels) + 0.4 * F.cross_entropy(auxiliary, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    shape = (ROWS, 3, SIZE, SIZE)
    images = [torch.randn(shape, device=device).to(memory_format=torch.channels_last) for _ in range(4)]
    batches = [(one, torch.randint(CLASSES, (ROWS,), device=device)) for one in images]
    return hotloop.Workload(model, optimizer, step, batches)
