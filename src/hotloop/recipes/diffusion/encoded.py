"""What a batch holds: latents and embeddings that were made once, or what is encoded in each step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

from hotloop.recipes.diffusion.pictures.latents import (
    Latents,
    Tensors,
    Texts,
    distinct,
    encode_pictures,
    encode_texts,
    weights_fingerprint,
)
from hotloop.train.batches import Batch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from hotloop.recipes.diffusion.denoiser import Denoiser
    from hotloop.recipes.diffusion.networks import Networks
    from hotloop.recipes.diffusion.pictures import Pictures
    from hotloop.recipes.diffusion.pictures.latents import Values
    from hotloop.recipes.diffusion.pictures.stored import Cache


class Pixels(Latents):
    """One side of a split whose pictures are encoded in each step; they are read anew each time.

    A batch's inputs are ``pixels`` and what the texts have; its labels are the numbers of the pictures.

    Args:
        pictures: all of them.
        texts: of all captions.
        rows: the numbers of the pictures on this side.
        told: as for `Latents`.
    """

    def __init__(self, pictures: Pictures, texts: Texts, rows: Tensor, told: Mapping[str, Tensor]) -> None:
        super().__init__(pictures, Tensors({}), texts, rows, told)
        self._pictures = pictures

    def take(self, rows: Tensor) -> Batch:
        """Return these rows of the side, all of one bucket, as a batch."""
        chosen = self.rows[rows]
        return Batch({"pixels": self._pictures.pixels(chosen), **self.beside(rows)}, chosen)


def told(networks: Networks, pictures: Pictures) -> dict[str, Tensor]:
    """Return what a UNet is told of each picture besides its caption: of SDXL its sizes and its cut, else nothing."""
    return {"time_ids": pictures.framing()} if networks.xl else {}


def of_pictures(denoiser: Denoiser, pictures: Pictures, cache: Cache) -> Values:
    """Return the latents of all pictures, encoded once."""
    device = denoiser.scale.device
    keyed = dataclasses.replace(cache, key={**cache.key, "vae": weights_fingerprint(denoiser.vae.net)})
    return encode_pictures(pictures, lambda pixels: denoiser.vae(pixels.to(device)), keyed)


def of_captions(denoiser: Denoiser, networks: Networks, captions: Sequence[str], cache: Cache | None) -> Texts:
    """Return what stands for captions in a batch; without a cache they are embedded in each step."""
    once = distinct(captions)
    if cache is None:
        return Texts(once, Tensors(networks.token_ids(once)))
    device, key = denoiser.scale.device, dict(cache.key)
    for (name, encoder), ids in zip(denoiser.encoders.items(), networks.token_ids(once).values(), strict=True):
        number = name.removeprefix("text_encoder")
        key[name] = weights_fingerprint(encoder)
        key[f"tokens{number}"] = hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()
    return encode_texts(
        captions,
        lambda texts: denoiser.embed({name: one.to(device) for name, one in networks.token_ids(texts).items()}),
        dataclasses.replace(cache, key=key),
    )
