"""The parts of a latent-diffusion trainer: networks, tokens, noise, the autoencoder's stage, LoRA, samples, output."""
