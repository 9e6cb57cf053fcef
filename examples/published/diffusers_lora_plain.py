"""LoRA on the UNet of a diffusion model, in the style of diffusers' text-to-image LoRA script.

Small networks with fresh weights stand in for pretrained ones; the pictures are handwritten digits.
"""

import argparse

import torch
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--rank", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=1e-3)
parser.add_argument("--train-batch-size", type=int, default=16)
parser.add_argument("--max-train-steps", type=int, default=200)
parser.add_argument("--rows", type=int, default=1600)


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


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vae, unet, text_encoder = networks(device)
    for frozen in (vae, unet, text_encoder):
        frozen.requires_grad_(False)
    unet.add_adapter(LoraConfig(r=args.rank, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    trained = [one for one in unet.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=10, num_training_steps=args.max_train_steps)
    noising = DDPMScheduler()

    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) / 8 - 1
    data = TensorDataset(pixels[: args.rows], torch.tensor(digits.target)[: args.rows])
    loader = DataLoader(data, batch_size=args.train_batch_size, shuffle=True, drop_last=True)

    done = 0
    while done < args.max_train_steps:
        for pictures, captions in loader:
            with torch.no_grad():
                latents = vae.encode(pictures.to(device)).latent_dist.sample() * vae.config.scaling_factor
                words = text_encoder(captions.to(device))[:, None]
            noise = torch.randn_like(latents)
            at = torch.randint(noising.config.num_train_timesteps, (len(latents),), device=device)
            noisy = noising.add_noise(latents, noise, at)
            loss = F.mse_loss(unet(noisy, at, words).sample, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done += 1
            if done % 20 == 0:
                print(f"step {done}: loss {loss.item():.4f}")
            if done == args.max_train_steps:
                break
    save_file(get_peft_model_state_dict(unet), "lora.safetensors")


if __name__ == "__main__":
    main()
