"""What is trained: a UNet that predicts the noise in latents, with the encoders of pictures and texts beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hotloop.recipes.diffusion.noise import Noise, offset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.recipes.diffusion.networks import Networks

SECOND = ("input_ids_2", "pooled")
"""What of a batch's texts is the second text encoder's alone."""


class Moments(nn.Module):
    """Gives the posterior of a VAE's latents; the decoder is not part of its call.

    ``net`` is diffusers' VAE, whose ``encode`` is no ``forward``, which is what compile deals with.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and logarithm of the variance, both of shape (batch, latent channels, height, width).

        Args:
            pixels: of shape (batch, 3, height, width) in -1..1.
        """
        net: Any = self.net
        found = net.encode(pixels, return_dict=False)[0]
        return found.mean, found.logvar


class Denoiser(nn.Module):
    """Noises latents, has the UNet predict what was done, and gives its error.

    Its ``state_dict`` holds what is trained. Frozen weights are left out and need not be there when it is loaded: the
    model's folder has them.

    Args:
        networks: of which ``unet`` is trained, or its adapters; a text encoder where parameters require gradients.
        noise: the schedule, and what is predicted.
        embedded: whether batches have embeddings of captions, or their tokens, of which they are made here.
        caption_dropout: the share of rows whose caption is taken for none in training, which sampling with guidance
            needs (Ho and Salimans 2022, Classifier-Free Diffusion Guidance). None is what the pipeline takes for it:
            the empty caption, or zeros for its embeddings.
        noise_offset: as for `hotloop.recipes.diffusion.noise.offset`.
    """

    scale: Tensor
    empty: Tensor
    empty_2: Tensor

    def __init__(
        self,
        networks: Networks,
        noise: Noise,
        *,
        embedded: bool,
        caption_dropout: float = 0.0,
        noise_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.unet, self.encoders = networks.unet, networks.encoders()
        for name, one in self.encoders.items():
            self.add_module(name, one)
        self.vae = Moments(networks.vae)
        self.noise, self._factor, self._zeros = noise, networks.factor, networks.zeros
        self._caption_dropout, self._noise_offset = caption_dropout, noise_offset
        self.trained = {name: any(p.requires_grad for p in one.parameters()) for name, one in self.encoders.items()}
        self.register_buffer("scale", torch.tensor(float(networks.vae.config.scaling_factor)))
        self.train(mode=False)
        nothing = {name: one.to(self.encoders["text_encoder"].device) for name, one in networks.token_ids([""]).items()}
        with torch.no_grad():
            nothing = self.embed(nothing) if embedded or self._zeros else nothing
        if self._zeros:
            nothing = {name: torch.zeros_like(one) for name, one in nothing.items()}
        first, second = [*nothing.values(), None][:2]
        self.register_buffer("empty", first)
        self.register_buffer("empty_2", second)  # none where there is one text encoder
        frozen = (name for name, one in self.named_parameters() if not one.requires_grad)
        self.left_out = frozenset(frozen) | {name for name, _ in self.named_buffers()}
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_may_miss)  # type: ignore[no-untyped-call]
        self.train()

    def train(self, mode: bool = True) -> Denoiser:
        """Set the mode of what is trained; frozen networks stay in evaluation mode."""
        super().train(mode)
        self.vae.eval()
        for name, one in self.encoders.items():
            one.train(mode and self.trained[name])
        return self

    def forward(  # noqa: PLR0913 - the inputs of a batch, by name
        self,
        *,
        mean: Tensor | None = None,
        logvar: Tensor | None = None,
        pixels: Tensor | None = None,
        noise: Tensor | None = None,
        timesteps: Tensor | None = None,
        time_ids: Tensor | None = None,
        **texts: Tensor,
    ) -> Tensor:
        """Return the error of what the UNet predicts, float32 of the latents' shape; its mean square is the loss.

        In training latents, noise and timesteps are drawn, and the error counts by `Noise.weight`.

        Args:
            mean: of the posterior of the latents, of shape (batch, channels, height, width).
            logvar: the logarithm of its variance, of the same shape.
            pixels: pictures, which are encoded, in place of both.
            noise: to add, of the latents' shape; None draws it.
            timesteps: int64 of shape (batch,); None draws them.
            time_ids: SDXL alone: each picture's original size, its cut and its size, of shape (batch, 6).
            texts: ``embeddings`` of the captions, of shape (batch, tokens, width), and of SDXL ``pooled`` ones, of
                shape (batch, width); or ``input_ids``, and of SDXL ``input_ids_2``, their tokens, which are embedded.
        """
        clean = self._latents(mean, logvar, pixels)
        texts = self._texts(texts)
        if noise is None:
            noise = offset(torch.randn_like(clean), self._noise_offset)
        if timesteps is None:
            timesteps = torch.randint(self.noise.steps, (len(clean),), device=clean.device)
        noise = noise.float()
        noisy, target = self.noise.add(clean, noise, timesteps), self.noise.target(clean, noise, timesteps)
        more = {}
        if "pooled" in texts:
            more = {"added_cond_kwargs": {"text_embeds": texts["pooled"], "time_ids": time_ids}}
        predicted: Tensor = self.unet(noisy, timesteps, texts["embeddings"], **more, return_dict=False)[0]
        error = predicted.float() - target
        if self.training:
            error = error * self.noise.weight(timesteps).sqrt().view(-1, 1, 1, 1)
        return error

    def parts(self) -> dict[str, nn.Module]:
        """Return what can be compiled, by name."""
        return {"unet": self.unet, **self.encoders, "vae": self.vae}

    def latent_shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Return the shape of the latents of a batch's inputs: (channels, height, width)."""
        if "mean" in inputs:
            return tuple(inputs["mean"].shape[1:])
        height, width = (side // self._factor for side in inputs["pixels"].shape[-2:])
        return int(self.unet.config.in_channels), height, width

    def _latents(self, mean: Tensor | None, logvar: Tensor | None, pixels: Tensor | None) -> Tensor:
        """Return latents, scaled to about the noise's size: drawn in training, the most likely ones otherwise."""
        if mean is None or logvar is None:
            assert pixels is not None
            # In float32 in any case: some VAEs overflow in float16, and none is trained here.
            with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
                mean, logvar = self.vae(pixels.float())
        mean = mean.float()
        if self.training:
            mean = mean + (0.5 * logvar.float()).exp() * torch.randn_like(mean)
        return mean * self.scale

    def _texts(self, texts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return embeddings, some of them of no caption in training."""
        if self._zeros:  # of no text, so they are put in behind the encoders
            return self._dropped(self.embed(texts))
        return self.embed(self._dropped(texts))

    def _dropped(self, texts: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.training or not self._caption_dropout:
            return texts
        first = next(iter(texts.values()))
        drop = torch.rand(len(first), device=first.device) < self._caption_dropout

        def kept(name: str, one: Tensor) -> Tensor:
            nothing = self.empty_2 if name in SECOND else self.empty
            return torch.where(drop.view(-1, *(1,) * (one.ndim - 1)), nothing.to(one.dtype), one)

        return {name: kept(name, one) for name, one in texts.items()}

    def embed(self, texts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the embeddings of tokens, by the names of `forward`; with gradients where an encoder trains.

        Those of one encoder are its last ones. Those of two are as SDXL has them: the last but one of both, side by
        side, and the projection of the second's.
        """
        if "input_ids" not in texts:
            return texts
        if len(self.encoders) == 1:
            return {"embeddings": self._encode("text_encoder", texts["input_ids"])[0]}
        first = self._encode("text_encoder", texts["input_ids"], output_hidden_states=True)
        second = self._encode("text_encoder_2", texts["input_ids_2"], output_hidden_states=True)
        return {"embeddings": torch.cat([first[-1][-2], second[-1][-2]], dim=-1), "pooled": second[0]}

    def _encode(self, name: str, input_ids: Tensor, **more: Any) -> Any:
        with torch.set_grad_enabled(self.trained[name] and torch.is_grad_enabled()):
            return self.encoders[name](input_ids, **more, return_dict=False)


def mean_square(error: Tensor, _: Tensor) -> Tensor:
    """Return the loss of a batch's errors; there is nothing else to hold them against."""
    return error.square().mean()


def _leave_out(module: Denoiser, state: dict[str, Any], prefix: str, _: object) -> None:
    for name in module.left_out:
        state.pop(prefix + name, None)


def _may_miss(module: Denoiser, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in module.left_out]
