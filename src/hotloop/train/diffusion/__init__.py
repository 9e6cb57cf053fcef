"""The parts of a latent-diffusion trainer: networks, tokens, noise, the autoencoder's own stage, LoRA, samples, output."""
