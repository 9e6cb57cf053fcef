"""The autoencoder's own stage: a small VAE that is made here has to give latents that mean something before anything else.

A pretrained one is used as it is. This one is trained on the training side alone, in a minute, and kept on disk: runs
with the same pictures, seed and settings find it there. It has to know only how pictures look, not what they show.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.train.batches import epoch_order
from hotloop.train.pictures.latents import weights_fingerprint
from hotloop.train.pictures.stored import Cache, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.train.pictures import Pictures

BATCH, RATE = 32, 2e-3
KL = 1e-4
"""How much the posterior's distance from a standard normal counts beside the squared error of a pixel; as little as in
Rombach et al. 2022 (High-Resolution Image Synthesis with Latent Diffusion Models), which only keeps latents in bounds."""
VERSION = "1"
"""Of this stage; another one makes other weights."""


class _Rows:
    """Rows of pictures as `epoch_order` takes them."""

    apart = True

    def __init__(self, pictures: Pictures, rows: Tensor) -> None:
        self.bucket, self.buckets, self._many = pictures.bucket[rows], len(pictures.sizes), len(rows)

    def __len__(self) -> int:
        return self._many


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """How a VAE is trained.

    Args:
        steps: optimizer steps.
        seed: of the order and the noise.
        device: where.
        cache: keeps the result.
        say: prints a line.
    """

    steps: int
    seed: int
    device: torch.device
    cache: Cache
    say: Callable[[str], None]


def prepare(vae: Any, pictures: Pictures, rows: Tensor, stage: Stage) -> None:
    """Train a VAE to give pictures back, or take the weights that an earlier run trained; its random numbers are its own.

    Sets its ``scaling_factor`` so that the latents of the training side have variance 1, as noise has.

    Args:
        vae: diffusers' AutoencoderKL with random weights, on ``stage.device``.
        pictures: all of them.
        rows: those to learn from, int64 of shape (rows,).
        stage: how.
    """
    key = {
        "version": VERSION, "steps": str(stage.steps), "seed": str(stage.seed), "begins": weights_fingerprint(vae),
        "pictures": pictures.fingerprint(), "rows": weights_of(rows), "torch": torch.__version__,
        "device": stage.device.type,
    }  # fmt: skip

    def make(_: Tensor) -> dict[str, Tensor]:
        stage.say(f"Autoencoder: {stage.steps} steps of its own, once")
        scale, error = _train(vae, pictures, rows, stage)
        state = {name: one.detach().cpu()[None] for name, one in vae.state_dict().items()}
        return {**state, "scaling_factor": torch.tensor([scale]), "error": torch.tensor([error])}

    kept = Store(stage.cache, "autoencoder", key).fill([torch.arange(1)], make).take(torch.zeros(1, dtype=torch.int64))
    scale, error = (float(kept.pop(name)) for name in ("scaling_factor", "error"))
    vae.load_state_dict({name: one[0] for name, one in kept.items()})
    vae.register_to_config(scaling_factor=scale)
    stage.say(f"Autoencoder: a pixel (-1 to 1) comes back within {error:.3f} (root mean square)")


def weights_of(rows: Tensor) -> str:
    """Give row numbers as a text that tells other ones apart."""
    return ",".join(map(str, rows.tolist()))


def _train(vae: Any, pictures: Pictures, rows: Tensor, stage: Stage) -> tuple[float, float]:
    """Give one over the standard deviation of latents, and the root mean square error of a pixel, both by the last tenth."""
    generator = torch.Generator(stage.device).manual_seed(stage.seed)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=stage.steps)
    order: list[Tensor] = []
    epoch, squares, errors = 0, [], []
    vae.train()
    for step in range(stage.steps):
        if not order:
            order, epoch = epoch_order(_Rows(pictures, rows), BATCH, stage.seed, epoch), epoch + 1  # type: ignore[arg-type] # it takes no rows
        pixels = pictures.pixels(rows[order.pop()]).to(stage.device)
        posterior = vae.encode(pixels, return_dict=False)[0]
        error = functional.mse_loss(vae.decode(posterior.sample(generator), return_dict=False)[0], pixels)
        loss = error + KL * posterior.kl().mean() / pixels[0].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step >= 0.9 * stage.steps:
            squares.append(posterior.mean.detach().square().mean())
            errors.append(error.detach())
    vae.eval()
    return float(torch.stack(squares).mean().rsqrt()), float(torch.stack(errors).mean().sqrt())
