"""Lightning Fabric's demo transformer, 4 sequences of 256 tokens a step, with a hot loop around the step.

On one device, or on two processes of the CPU by DDP::

    python examples/fabric_transformer.py
    python examples/fabric_transformer.py --devices 2 --run full
"""

import argparse
import gc

import lightning
import torch
from lightning.pytorch.demos import Transformer
from torch import Tensor
from torch.nn import functional as F

from hotloop.integrations.fabric import loop as fabric_loop

VOCABULARY, BATCH, LENGTH = 128, 4, 256


def train(fabric: lightning.Fabric, run: str, steps: int) -> list[float]:
    """Train on tokens that follow each other by a rule; gives the losses, nats a token."""
    lightning.seed_everything(0, verbose=False)
    model = Transformer(VOCABULARY)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tokens = (torch.arange(LENGTH + 1) * 7 + torch.arange(BATCH)[:, None] + fabric.global_rank) % VOCABULARY
    inputs, target = fabric.to_device((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))

    loop = fabric_loop(fabric, model, optimizer, run=run, total_steps=steps)  # the one line that is added, and the next

    @loop.step
    def train_step(inputs: Tensor, target: Tensor) -> Tensor:
        loss = F.nll_loss(model(inputs, target), target.view(-1))
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = [train_step(inputs, target) for _ in range(steps)]
    fabric.print(loop.status())
    loop.close()
    return [float(one) for one in losses]


def leave(fabric: lightning.Fabric) -> None:
    """Leave the group of processes in order: what holds it is collected, and nobody goes while another is busy."""
    gc.collect()
    fabric.barrier()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="auto", help="cpu or cuda")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--run", default="auto", help="auto, a tier, or a preset")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    given = parser.parse_args()
    accelerator = "cpu" if given.accelerator == "auto" and not torch.cuda.is_available() else given.accelerator
    strategy = "ddp" if given.devices > 1 else "auto"
    fabric = lightning.Fabric(accelerator=accelerator, devices=given.devices, strategy=strategy)
    fabric.launch()
    losses = train(fabric, given.run, given.steps)
    fabric.print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    leave(fabric)


if __name__ == "__main__":
    main()
