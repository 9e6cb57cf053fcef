"""A user's program: train the UNet of diffusers to remove noise, on scikit-learn's digits.

On a GPU it is as large as Stable Diffusion 1.5's, with latents and text of the same shapes; on a CPU it is small.
"""

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from sklearn.datasets import load_digits
from torch.nn import functional as F

import hotloop

SMALL = {
    "sample_size": 16,
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
    "norm_num_groups": 8,
}
LARGE = {"sample_size": 64, "cross_attention_dim": 768}


def make() -> hotloop.Workload:
    """Give the program with fresh weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = LARGE if device.type == "cuda" else SMALL
    model = UNet2DConditionModel(in_channels=4, out_channels=4, **config).to(device)
    noising = DDPMScheduler()
    kept = noising.alphas_cumprod.to(device)
    captions = torch.nn.Embedding(10, config["cross_attention_dim"]).to(device).requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(images)
        at = torch.randint(len(kept), (len(images),), device=device)
        scale = kept[at, None, None, None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            guess = model(scale.sqrt() * images + (1 - scale).sqrt() * noise, at, captions(digits)[:, None]).sample
            loss = F.mse_loss(guess.float(), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32, device=device)[:, None] / 8 - 1
    images = F.interpolate(pixels, size=config["sample_size"]).expand(-1, 4, -1, -1)
    digits = torch.tensor(found.target, device=device)
    size = 8
    batches = [(images[at : at + size], digits[at : at + size]) for at in range(0, len(images), size)]
    return hotloop.Workload(model, optimizer, step, batches)
