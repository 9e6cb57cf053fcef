"""The arithmetic of diffusion: noised latents, what is predicted of them, and how much each amount of noise counts.

Written here, and not called from a scheduler, since it runs within the training step: a scheduler moves its tables to
the device as it is called, which a captured step cannot do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

Prediction = Literal["epsilon", "v_prediction"]
"""What a network predicts: the noise (Ho et al. 2020), or velocity (Salimans and Ho 2022)."""


class Noise(nn.Module):
    """How latents are noised: ``x_t = alpha_t x_0 + sigma_t epsilon``, with ``alpha_t^2 + sigma_t^2 = 1``.

    Args:
        scheduler: diffusers' scheduler, for its ``alphas_cumprod`` (which is ``alpha_t^2``).
        prediction: what the network predicts.
        min_snr_gamma: as for `weight`; None counts all timesteps alike.

    Raises:
        ConfigError: the noise is predicted where at the last timestep there is nothing else.
    """

    alpha: Tensor
    sigma: Tensor

    def __init__(self, scheduler: Any, prediction: Prediction, min_snr_gamma: float | None) -> None:
        super().__init__()
        kept = scheduler.alphas_cumprod.float()
        if prediction == "epsilon" and float(kept.min()) <= 0:
            raise ConfigError(
                "diffusion.prediction=epsilon: the model's schedule ends in noise alone (zero terminal SNR), where the "
                "noise is seen and nothing is learnt by predicting it; expected v_prediction"
            )
        self.prediction, self.gamma, self.steps = prediction, min_snr_gamma, len(kept)
        # They follow from the scheduler, so no checkpoint needs them. Computed as it does, to its last bit.
        self.register_buffer("alpha", kept**0.5, persistent=False)
        self.register_buffer("sigma", (1 - kept) ** 0.5, persistent=False)

    def add(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return noised latents.

        Args:
            clean: latents, of shape (batch, ...).
            noise: of the same shape.
            timesteps: int64 of shape (batch,).
        """
        alpha, sigma = self._at(timesteps, clean)
        return alpha * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        """Return what the network is to predict: the noise, or ``v = alpha_t epsilon - sigma_t x_0``; as for `add`."""
        if self.prediction == "epsilon":
            return noise
        alpha, sigma = self._at(timesteps, clean)
        return alpha * noise - sigma * clean

    def weight(self, timesteps: Tensor) -> Tensor:
        """Return how much the squared error at each timestep counts, float32 of shape (batch,).

        With gamma it is Min-SNR (Hang et al. 2023, Efficient Diffusion Training via Min-SNR Weighting Strategy,
        arXiv:2303.09556): the weight ``min(SNR, gamma)`` of the error of ``x_0``, with ``SNR = alpha_t^2 / sigma_t^2``,
        written for what is predicted: ``min(SNR, gamma) / SNR`` for the noise, ``min(SNR, gamma) / (SNR + 1)`` for v.
        """
        if self.gamma is None:
            return torch.ones_like(self.sigma[timesteps])
        signal, noise = self.alpha[timesteps].square(), self.sigma[timesteps].square()
        if self.prediction == "epsilon":
            # Written so that neither no noise nor no signal divides by zero.
            return (self.gamma * noise / signal).clamp(max=1.0)
        return torch.minimum(signal, self.gamma * noise)  # SNR + 1 = 1 / sigma^2

    def _at(self, timesteps: Tensor, like: Tensor) -> Sequence[Tensor]:
        shape = (-1, *(1,) * (like.ndim - 1))
        return self.alpha[timesteps].view(shape), self.sigma[timesteps].view(shape)


def offset(noise: Tensor, strength: float) -> Tensor:
    """Add to each channel's noise a value of its own (N. Guttenberg 2023, Diffusion with Offset Noise).

    Without it a model hardly learns pictures that are dark or bright as a whole.

    Args:
        noise: of shape (batch, channels, height, width).
        strength: how large the value is; 0 adds, and draws, none.
    """
    if not strength:
        return noise
    return noise + strength * torch.randn(*noise.shape[:2], 1, 1, device=noise.device, dtype=noise.dtype)
