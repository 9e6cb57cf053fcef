"""LoRA on the UNet of a diffusion model, in the style of diffusers' text-to-image LoRA script, through the door.

Small networks with fresh weights stand in for pretrained ones; the pictures are handwritten digits.
hotloop train examples/published/diffusers_lora.py:make training.num_epochs=2
"""

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hotloop


def networks(device):
    vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
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
    )
    return vae.to(device), unet.to(device), torch.nn.Embedding(10, 16, device=device)


def make(
    rank: int = 4, learning_rate: float = 1e-3, train_batch_size: int = 16, max_train_steps: int = 200, rows: int = 1600
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vae, unet, text_encoder = networks(device)
    for frozen in (vae, unet, text_encoder):
        frozen.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = [one for one in unet.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=max_train_steps)
    noising = DDPMScheduler()

    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    data = TensorDataset(pixels[:rows], torch.tensor(digits.target)[:rows])
    loader = DataLoader(data, batch_size=train_batch_size, shuffle=True, drop_last=True)

    def ready(pictures, captions):
        if optimizer.state:  # the first step has the first rate
            schedule.step()
        with torch.no_grad():
            latents = vae.encode(pictures.to(device)).latent_dist.sample() * vae.config.scaling_factor
            words = text_encoder(captions.to(device))[:, None]
        noise = torch.randn_like(latents)
        at = torch.randint(noising.config.num_train_timesteps, (len(latents),), device=device)
        noisy = noising.add_noise(latents, noise, at)
        return noisy, at, words, noise

    def step(noisy, at, words, noise):
        loss = F.mse_loss(unet(noisy, at, words).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload({"unet": unet}, optimizer, step, loader, before=ready, state=schedule)
