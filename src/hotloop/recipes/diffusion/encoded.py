"""What a batch holds: latents and embeddings that were made once and kept on disk, or what is encoded in each step."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotloop.cache.files import default_folder
from hotloop.errors import DataError
from hotloop.files import whole
from hotloop.recipes.diffusion.networks import weights_fingerprint
from hotloop.train.batches import Batch
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hotloop.recipes.diffusion.denoiser import Denoiser
    from hotloop.recipes.diffusion.networks import Networks
    from hotloop.recipes.diffusion.pictures import Pictures

Tensors = dict[str, Tensor]
"""Values of rows by name, each of shape (rows, ...)."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """Where networks run, and where what they give for all pictures and captions is kept.

    Args:
        folder: the run's, which keeps it where ``HOTLOOP_CACHE_DIR`` is empty; else all runs share hotloop's own.
        device: where the networks run.
        batch_size: rows in a forward pass of an encoder.
        say: prints a line.
    """

    folder: Path
    device: torch.device
    batch_size: int
    say: Callable[[str], None]

    def kept(self, kind: str, key: object, names: Sequence[str], encode: Callable[[list[int]], Tensors]) -> Tensors:
        """Return what an encoder gives for rows: read from its file, or made now and written to it.

        Batches have one size, the last filled up, so that a compiled encoder is compiled once. The file is mapped.

        Args:
            kind: names the values in the file's name and in messages.
            key: all that they depend on; kernels may differ between devices and versions of torch.
            names: of the rows, for messages.
            encode: gives the values of rows by their numbers; is called without gradients.

        Raises:
            DataError: a value is not finite; the message names the row.
            OSError: the file cannot be written.
        """
        safetensors = require("safetensors.torch", "diffusion.cache", "diffusion")
        told = json.dumps([torch.__version__, self.device.type, key, names]).encode()
        folder = (default_folder() or self.folder / "cache") / "pictures"
        path = folder / f"{kind}-{hashlib.sha256(told).hexdigest()[:24]}.safetensors"
        if path.is_file():
            self.say(f"Cache: {len(names):,} {kind} read from {path}")
        else:
            self.say(f"Cache: {len(names):,} {kind} are encoded once, for {path}")
            made = self._made(names, encode)
            try:
                with whole(path, shared=True) as file:
                    safetensors.save_file(made, file.name)
            except Exception as error:  # a full disk is an OSError, or an error of safetensors' own
                raise OSError(f"{path} cannot be written: {error}") from error
        return dict(safetensors.load_file(path))

    def _made(self, names: Sequence[str], encode: Callable[[list[int]], Tensors]) -> Tensors:
        made, many = list[Tensors](), len(names)
        for start in range(0, many, self.batch_size):
            rows = [min(row, many - 1) for row in range(start, start + self.batch_size)]
            with torch.no_grad():
                values = {name: one[: many - start].cpu() for name, one in encode(rows).items()}
            for name, one in values.items():
                if not bool(one.isfinite().all()):
                    wrong = int((~one.isfinite()).flatten(1).any(1).nonzero()[0])
                    raise DataError(f"{name} is not finite for {names[start + wrong]}: check the model's weights")
            made.append(values)
        return {name: torch.cat([one[name] for one in made]).contiguous() for name in made[0]}


@dataclasses.dataclass(frozen=True)
class Texts:
    """Distinct captions, each with its values: embeddings, or tokens."""

    rows: Mapping[str, int]
    values: Tensors


class Side:
    """One side of a split, as the fit loop takes data: rows of one bucket make a batch.

    A batch's inputs are ``mean`` and ``logvar`` of the latents, or ``pixels`` that are encoded in each step, and
    whatever the texts have (``input_ids``, ...). Its labels are the numbers of the pictures, int64 of shape (batch,):
    validation seeds a picture's noise by its number.

    Args:
        pictures: all of them.
        rows: the numbers of the pictures on this side.
        texts: of all captions.
        moments: of all pictures, by bucket, as `of_pictures` gives them; None reads pictures anew each time.
        told: more inputs, by name, of all pictures.
    """

    apart = True

    def __init__(
        self, pictures: Pictures, rows: Tensor, texts: Texts, moments: Sequence[Tensors] | None, told: Tensors
    ) -> None:
        self.rows, self._pictures, self._moments = rows, pictures, moments
        self.bucket, self.buckets = pictures.bucket[rows], len(pictures.sizes)
        self._texts, self._told = texts.values, told
        self._text = torch.tensor([texts.rows[pictures.captions[row]] for row in rows.tolist()])
        alike = pictures.bucket[:, None] == torch.arange(self.buckets)
        self._place = (alike.cumsum(0) - 1).gather(1, pictures.bucket[:, None])[:, 0]  # of a picture within its bucket

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor) -> Batch:
        """Return these rows of the side, all of one bucket, as a batch."""
        chosen = self.rows[rows]
        if self._moments is None:
            inputs = {"pixels": self._pictures.pixels(chosen)}
        else:
            moments = self._moments[int(self.bucket[rows[0]])]
            inputs = {name: one[self._place[chosen]] for name, one in moments.items()}
        inputs |= {name: one[chosen] for name, one in self._told.items()}
        inputs |= {name: one[self._text[rows]] for name, one in self._texts.items()}
        return Batch(inputs, chosen)

    def unfilled(self, batch_size: int, together: int = 1) -> int:
        """Return how many rows are in buckets that do not fill the batches of one step: training never sees them."""
        counts = self.bucket.bincount()
        return int(counts[counts < min(batch_size, len(self)) * together].sum())


def told(networks: Networks, pictures: Pictures) -> Tensors:
    """Return what a UNet is told of each picture besides its caption: of SDXL its sizes and its cut, else nothing."""
    return {"time_ids": pictures.framing()} if networks.xl else {}


def of_pictures(denoiser: Denoiser, pictures: Pictures, cache: Cache) -> list[Tensors]:
    """Return ``mean`` and ``logvar`` of the latents' posterior of all pictures, encoded once: one mapping a bucket."""
    vae, found = weights_fingerprint(denoiser.vae.net), []
    for index, size in enumerate(pictures.sizes):
        rows = (pictures.bucket == index).nonzero()[:, 0]

        def encode(mine: list[int], rows: Tensor = rows) -> Tensors:
            mean, logvar = denoiser.vae(pictures.pixels(rows[mine]).to(cache.device))
            return {"mean": mean, "logvar": logvar}

        stamps = [pictures.found[row].stamp for row in rows.tolist()]
        names = [str(pictures.found[row].path) for row in rows.tolist()]
        found.append(cache.kept("latents", [vae, size, stamps], names, encode))
    return found


def of_captions(denoiser: Denoiser, networks: Networks, captions: Sequence[str], cache: Cache | None) -> Texts:
    """Return what stands for captions in a batch; without a cache they are embedded in each step."""
    distinct = list(dict.fromkeys(captions))
    ids, rows = networks.token_ids(distinct), {text: row for row, text in enumerate(distinct)}
    if cache is None:
        return Texts(rows, ids)
    key = [*map(weights_fingerprint, denoiser.encoders.values()), *(one.tolist() for one in ids.values())]

    def encode(mine: list[int]) -> Tensors:
        return denoiser.embed({name: one[mine].to(cache.device) for name, one in ids.items()})

    return Texts(rows, cache.kept("texts", key, distinct, encode))
