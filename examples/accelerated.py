"""A user's program: a training loop with Accelerate, whose ``prepare`` is hotloop's, and whose step is a loop's."""

import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import hotloop
from hotloop.integrations.accelerate import prepare


def main(run: str = "auto", steps: int = 24) -> tuple[hotloop.LoopStatus, list[float]]:
    """Train a small GPT-2 to repeat its text; gives the status and the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16")
    config = GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # preset="none": the loop chooses what to compile. Without a loop, leave it out: the model is compiled in place.
    model, optimizer = prepare(accelerator, model, optimizer, preset="none")
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=steps)

    @loop.step
    def train_step(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randint(32, (8, 16), device=accelerator.device)
    losses = [float(train_step(batch).detach()) for _ in range(steps)]
    status = loop.status()
    loop.close()
    print(status)  # noqa: T201 - a program prints
    return status, losses


if __name__ == "__main__":
    main()
