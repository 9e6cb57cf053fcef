"""A character-level GPT on Python's own documentation, by a training loop in the style of nanoGPT's, through the door.

hotloop train examples/published/nanogpt.py:make recipe.goal=min:val_loss training.num_epochs=4
"""

import math
from pydoc_data.topics import topics

import torch
from gpt import GPT

import hotloop


def make(
    lr: float = 1e-3, min_lr: float = 1e-4, warmup_iters: int = 20, weight_decay: float = 0.1, grad_clip: float = 1.0,
    batch_size: int = 16, block_size: int = 64, layers: int = 2, heads: int = 4, width: int = 64, grad_accum: int = 2,
    max_iters: int = 200, eval_interval: int = 50, eval_iters: int = 10,
):  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"

    text = "\n".join(topics.values())
    characters = sorted(set(text))
    number = {one: at for at, one in enumerate(characters)}
    ids = torch.tensor([number[one] for one in text])
    split = int(0.9 * len(ids))
    data = {"train": ids[:split], "val": ids[split:]}

    def get_batch(side):
        at = torch.randint(len(data[side]) - block_size, (batch_size,))
        rows = torch.stack([data[side][one : one + block_size + 1] for one in at]).to(device)
        return rows[:, :-1], rows[:, 1:]

    model = GPT(len(characters), block_size, layers, heads, width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.stack([model(*get_batch("val")) for _ in range(eval_iters)])
        model.train()
        return {"val_loss": losses.mean().item()}

    def get_lr(it):
        if it < warmup_iters:
            return (it + 1) / (warmup_iters + 1)
        share = (it - warmup_iters) / max(1, max_iters - warmup_iters)
        return (min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, share))) * (lr - min_lr)) / lr

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, get_lr)

    def ready(_):
        if optimizer.state:  # the first step has the first rate
            schedule.step()
        return tuple(get_batch("train") for _ in range(grad_accum))

    def step(*batches):
        for batch in batches:
            loss = model(*batch) / grad_accum
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss * grad_accum

    return hotloop.Workload(
        model, optimizer, step, range(eval_interval), metrics=estimate_loss, before=ready, state=schedule
    )
