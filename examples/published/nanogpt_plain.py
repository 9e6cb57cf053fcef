"""A character-level GPT on Python's own documentation, by a training loop in the style of nanoGPT's."""

import math
import os
import time
from pydoc_data.topics import topics

import torch
from gpt import GPT

lr, min_lr, warmup_iters, weight_decay, grad_clip = 1e-3, 1e-4, 20, 0.1, 1.0
batch_size, block_size, layers, heads, width, grad_accum = 16, 64, 2, 4, 64, 2
max_iters, eval_interval, eval_iters, log_interval = 200, 50, 10, 10
out_dir = "out-characters"

torch.manual_seed(1337)
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
    return losses.mean().item()


def get_lr(it):
    if it < warmup_iters:
        return lr * (it + 1) / (warmup_iters + 1)
    share = (it - warmup_iters) / max(1, max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * min(1.0, share))) * (lr - min_lr)


iter_num, best_val_loss = 0, 1e9
if os.path.exists(f"{out_dir}/ckpt.pt"):
    checkpoint = torch.load(f"{out_dir}/ckpt.pt")
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]

since = time.time()
while iter_num < max_iters:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)

    if iter_num % eval_interval == 0:
        val_loss = estimate_loss()
        print(f"step {iter_num}: val loss {val_loss:.4f}")
        if val_loss < best_val_loss and iter_num > 0:
            best_val_loss = val_loss
            os.makedirs(out_dir, exist_ok=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "iter_num": iter_num, "best_val_loss": best_val_loss}, f"{out_dir}/ckpt.pt")

    for _ in range(grad_accum):
        loss = model(*get_batch("train")) / grad_accum
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0:
        now = time.time()
        print(f"iter {iter_num}: loss {loss.item() * grad_accum:.4f}, time {1000 * (now - since):.0f} ms")
        since = now
    iter_num += 1
