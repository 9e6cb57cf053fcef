"""LoRA on the denoiser of a diffusion model, with VAE and text encoder frozen; two adapters are trained and switched.

Small models with fresh weights stand in for pretrained ones, so that it runs anywhere::

    python examples/lora.py
    python examples/lora.py --preset default --steps 20

The first preset keeps eager's kernels, so that compiling takes seconds on a CPU; ``default`` is Inductor's.
"""

import argparse

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from torch.nn import functional as F

import hotloop
from hotloop.integrations.diffusers import Parts, compile  # noqa: A004 - hotloop.compile's name


def train(preset: str, steps: int) -> tuple[hotloop.Status, list[float]]:
    """Train one adapter, then another, so many steps each; gives the status and the losses."""
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4).to(device)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16,),
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=4,
    ).to(device)
    texts = torch.nn.Embedding(10, 16, device=device)
    for frozen in (vae, unet, texts):
        frozen.requires_grad_(requires_grad=False)
    parts = compile(Parts(unet=unet, vae=vae, text_encoder=texts), preset)  # the denoiser alone

    noising, images = DDPMScheduler(), torch.rand(4, 3, 8, 8, device=device)
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
    losses = []
    for name in ("pen", "ink"):
        unet.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]), adapter_name=name)
        unet.set_adapter(name)
        trained = [one for one in unet.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        for _ in range(steps):
            noise, at = torch.ones_like(latents), torch.full((4,), 500, device=device)
            noisy = noising.add_noise(latents, noise, at)
            loss = F.mse_loss(unet(noisy, at, texts(torch.arange(4, device=device))[:, None]).sample, noise)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return hotloop.status(parts), losses


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="aot_eager", help="what the denoiser is compiled with, or none")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of each adapter")
    given = parser.parse_args()
    status, losses = train(given.preset, given.steps)
    print(status)  # noqa: T201 - a program prints
    for name, first, last in (("pen", 0, given.steps - 1), ("ink", given.steps, -1)):
        print(f"{name}: loss {losses[first]:.3f} at the first step, {losses[last]:.3f} at the last")  # noqa: T201


if __name__ == "__main__":
    main()
