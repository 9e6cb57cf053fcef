"""The autoencoder's own stage: a small VAE that is made here has to be trained before anything else.

A pretrained one is used as it is. This one is trained on the training side alone, in a minute, and kept on disk: runs
with the same pictures, seed and settings find it there. It has to know only how pictures look, not what they show.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.recipes.diffusion.pictures.latents import weights_fingerprint
from hotloop.recipes.diffusion.pictures.stored import Store
from hotloop.train.batches import epoch_order

if TYPE_CHECKING:
    from hotloop.recipes.diffusion.pictures import Pictures
    from hotloop.recipes.diffusion.place import Place

BATCH, RATE = 32, 2e-3
KL = 1e-4
"""How much the posterior's distance from a standard normal counts beside the squared error of a pixel: little, to keep
latents in bounds (Rombach et al. 2022, High-Resolution Image Synthesis with Latent Diffusion Models)."""
STEADY = 0.9
"""The share of the steps after which latents and errors are measured."""
VERSION = "1"
"""Of this stage; another one makes other weights."""


class _Rows:
    """Rows of pictures as `epoch_order` takes them."""

    apart = True

    def __init__(self, pictures: Pictures, rows: Tensor) -> None:
        self.bucket, self.buckets, self._many = pictures.bucket[rows], len(pictures.sizes), len(rows)

    def __len__(self) -> int:
        return self._many


def prepare(  # noqa: PLR0913 - what a stage of training takes
    vae: Any, pictures: Pictures, rows: Tensor, *, steps: int, seed: int, place: Place
) -> None:
    """Train a VAE to give pictures back, or take the weights that an earlier run trained.

    Random numbers are its own. Sets its ``scaling_factor`` so that the latents of the training side have variance 1, as
    noise has. It is frozen and in evaluation mode then.

    Args:
        vae: diffusers' AutoencoderKL with random weights, on the place's device.
        pictures: all of them.
        rows: those to learn from, int64 of shape (rows,).
        steps: optimizer steps.
        seed: of the order and the noise.
        place: where it runs, and its weights are kept.
    """
    cache = place.cache()
    key = {
        **cache.key, "version": VERSION, "steps": str(steps), "seed": str(seed), "begins": weights_fingerprint(vae),
        "pictures": pictures.fingerprint(), "rows": hashlib.sha256(repr(rows.tolist()).encode()).hexdigest(),
    }  # fmt: skip

    def make(_: Tensor) -> dict[str, Tensor]:
        place.say(f"Autoencoder: {steps} steps of its own, once")
        vae.requires_grad_(requires_grad=True)
        scale, error = _train(vae, pictures, rows, steps, torch.Generator(place.device).manual_seed(seed))
        vae.requires_grad_(requires_grad=False)
        state = {name: one.detach().cpu()[None] for name, one in vae.state_dict().items()}
        return {**state, "scaling_factor": torch.tensor([scale]), "error": torch.tensor([error])}

    kept = Store(cache, "autoencoder", key).fill([torch.arange(1)], make).take(torch.zeros(1, dtype=torch.int64))
    scale, error = (float(kept.pop(name)) for name in ("scaling_factor", "error"))
    vae.load_state_dict({name: one[0] for name, one in kept.items()})
    vae.register_to_config(scaling_factor=scale)
    place.say(f"Autoencoder: a pixel (-1 to 1) comes back within {error:.3f} (root mean square)")


def _train(vae: Any, pictures: Pictures, rows: Tensor, steps: int, generator: torch.Generator) -> tuple[float, float]:
    """Return one over the standard deviation of latents, and a pixel's root mean square error, by the last steps."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    shaped, order = _Rows(pictures, rows), list[Tensor]()
    size = min(BATCH, int(shaped.bucket.bincount().max()))  # a folder may have fewer pictures of each size
    epoch, squares, errors = 0, [], []
    vae.train()
    for step in range(steps):
        if not order:
            order, epoch = epoch_order(shaped, size, generator.initial_seed(), epoch), epoch + 1
        pixels = pictures.pixels(rows[order.pop()]).to(generator.device)
        posterior = vae.encode(pixels, return_dict=False)[0]
        error = functional.mse_loss(vae.decode(posterior.sample(generator), return_dict=False)[0], pixels)
        loss = error + KL * posterior.kl().mean() / pixels[0].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step >= STEADY * steps:
            squares.append(posterior.mean.detach().square().mean())
            errors.append(error.detach())
    vae.eval()
    return float(torch.stack(squares).mean().rsqrt()), float(torch.stack(errors).mean().sqrt())
