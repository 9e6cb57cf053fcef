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
    from collections.abc import Sequence

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
    """

    def __init__(self, pictures: Pictures, texts: Texts, rows: Tensor) -> None:
        super().__init__(pictures, Tensors({}), texts, rows)
        self._pictures = pictures

    def take(self, rows: Tensor) -> Batch:
        """Return these rows of the side, all of one bucket, as a batch."""
        chosen = self.rows[rows]
        return Batch({"pixels": self._pictures.pixels(chosen), **self.texts.take(self.text[rows])}, chosen)


def of_pictures(denoiser: Denoiser, pictures: Pictures, cache: Cache) -> Values:
    """Return the latents of all pictures, encoded once."""
    device = denoiser.scale.device
    keyed = dataclasses.replace(cache, key={**cache.key, "vae": weights_fingerprint(denoiser.vae.net)})
    return encode_pictures(pictures, lambda pixels: denoiser.vae(pixels.to(device)), keyed)


def of_captions(denoiser: Denoiser, networks: Networks, captions: Sequence[str], cache: Cache | None) -> Texts:
    """Return what stands for captions in a batch; without a cache they are embedded in each step."""
    if cache is None:
        once = distinct(captions)
        return Texts(once, Tensors({"input_ids": networks.token_ids(once)}))
    device = denoiser.scale.device
    tokens = hashlib.sha256(json.dumps(networks.token_ids(distinct(captions)).tolist()).encode()).hexdigest()
    key = {**cache.key, "text_encoder": weights_fingerprint(denoiser.text_encoder), "tokens": tokens}
    return encode_texts(
        captions,
        lambda texts: {"embeddings": denoiser.embed(networks.token_ids(texts).to(device))},
        dataclasses.replace(cache, key=key),
    )
