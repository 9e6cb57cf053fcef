"""What a VAE and a text encoder give for all pictures and captions, kept on disk, and batches of it.

A VAE is run over each picture once, and not in each epoch. What is kept are the parameters of its posterior, so that
training can draw from it anew each time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hotloop.errors import DataError
from hotloop.recipes.diffusion.pictures.stored import PART, Cache, Store, Stored
from hotloop.train.batches import Batch

if TYPE_CHECKING:
    from torch import nn

    from hotloop.recipes.diffusion.pictures.loading import Pictures

EncodePictures = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes pictures, float32 of shape (batch, channels, height, width) in -1..1 on the CPU; gives the mean and the
logarithm of the variance of their latents, both (batch, latent channels, latent height, latent width), any device."""
EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Takes texts; gives tensors by the names that the model's inputs have, each of shape (batch, ...), on any device."""

__all__ = ["Cache", "Latents", "Tensors", "Texts", "distinct", "encode_pictures", "encode_texts", "weights_fingerprint"]


class Values(Protocol):
    """Tensors of rows, by name."""

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return these rows, each tensor of shape (rows, ...) on the CPU; ``rows`` is int64 of shape (rows,)."""


class Tensors:
    """Values that are held in memory, such as the tokens of captions.

    Args:
        values: by name, each of shape (rows, ...).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = dict(values)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return these rows."""
        return {name: one[rows] for name, one in self.values.items()}


class Texts:
    """Distinct texts, each with its values: embeddings, or tokens.

    Args:
        texts: distinct, in the order of the values' rows (`distinct` makes them so).
        values: of one row a text.
    """

    def __init__(self, texts: Sequence[str], values: Values) -> None:
        self.texts, self.values = list(texts), values
        self._rows = {text: row for row, text in enumerate(self.texts)}

    def rows(self, texts: Sequence[str]) -> Tensor:
        """Return the row of each of these texts, int64 of shape (texts,).

        Raises:
            KeyError: a text that is not among them.
        """
        return torch.tensor([self._rows[text] for text in texts], dtype=torch.int64)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the values of these rows, each of shape (rows, ...)."""
        return self.values.take(rows)


def distinct(texts: Sequence[str]) -> list[str]:
    """Return each text once, in the order in which they first come."""
    return list(dict.fromkeys(texts))


def weights_fingerprint(module: nn.Module) -> str:
    """Return a text that changes with any weight or buffer of a module, with its class, and with its configuration.

    The configuration is that of diffusers and transformers, ``module.config``, without names of folders and versions.
    """
    digest = hashlib.sha256(type(module).__qualname__.encode())
    digest.update(json.dumps(_config(module), sort_keys=True, default=str).encode())
    for name, one in sorted([*module.named_parameters(), *module.named_buffers()], key=lambda item: item[0]):
        digest.update(repr((name, one.dtype, tuple(one.shape))).encode())
        # NumPy has no bfloat16, so the bytes are taken as such.
        digest.update(one.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config(module: nn.Module) -> dict[str, object]:
    config: Any = getattr(module, "config", None)
    made = config.to_dict() if hasattr(config, "to_dict") else config
    values = dict(made) if isinstance(made, Mapping) else {}
    return {
        str(name): value
        for name, value in values.items()
        if not str(name).startswith("_") and name != "transformers_version"
    }


def encode_pictures(pictures: Pictures, encode: EncodePictures, cache: Cache) -> Stored:
    """Encode all pictures, bucket by bucket, or read what an earlier run encoded.

    Every batch has ``cache.batch_size`` rows, the last of a part filled up, so that a compiled VAE is compiled for each
    bucket once. A run that is killed leaves whole parts only, which the next one reuses.

    Args:
        pictures: what to encode.
        encode: the VAE's part; is called without gradients, and must not draw anything random.
        cache: where the result is kept, and what it depends on besides the pictures: the VAE's weights.

    Returns:
        ``mean`` and ``logvar`` by picture, of shape (rows, latent channels, latent height, latent width) for rows of
        one bucket.

    Raises:
        DataError: the VAE gave a number that is not finite for a picture; the message names it.
        OSError: the cache cannot be written.
    """

    def make(rows: Tensor) -> dict[str, Tensor]:
        made: list[tuple[Tensor, Tensor]] = []
        filled = list(_filled(rows, cache.batch_size))
        for mine, count in filled:
            with torch.no_grad():
                mean, logvar = encode(pictures.pixels(mine))
            made.append((_kept(mean[:count], cache.dtype), _kept(logvar[:count], cache.dtype)))
        part = {"mean": torch.cat([one for one, _ in made]), "logvar": torch.cat([one for _, one in made])}
        _finite(part, [pictures.names[row] for row in rows.tolist()], "the VAE", cache.dtype)
        return part

    order = pictures.bucket.argsort(stable=True)
    counts = pictures.bucket.bincount(minlength=len(pictures.sizes)).tolist()
    rows = [part for alike in torch.split(order, counts) if len(alike) for part in torch.split(alike, PART)]
    return Store(cache, "latents", {"pictures": pictures.fingerprint(), **cache.key}).fill(rows, make)


def encode_texts(texts: Sequence[str], encode: EncodeTexts, cache: Cache) -> Texts:
    """Encode each distinct text once, or read what an earlier run encoded.

    Args:
        texts: captions, and whatever else is to be embedded, such as the empty text and the prompts of samples.
        encode: the text encoder's part, its tokenizer included; is called without gradients. Numbers with a fraction
            are kept in ``cache.dtype``, others as they are.
        cache: where the result is kept, and what it depends on besides the texts: the encoder's weights, its tokenizer.

    Raises:
        DataError: the encoder gave a number that is not finite for a text; the message quotes it.
        OSError: the cache cannot be written.
    """
    once = distinct(texts)

    def make(rows: Tensor) -> dict[str, Tensor]:
        made = []
        for filled, count in _filled(rows, cache.batch_size):
            with torch.no_grad():
                values = encode([once[row] for row in filled.tolist()])
            made.append({name: _kept(one[:count], cache.dtype) for name, one in values.items()})
        part = {name: torch.cat([one[name] for one in made]) for name in made[0]}
        _finite(part, [repr(once[row]) for row in rows.tolist()], "the text encoder", cache.dtype)
        return part

    fingerprint = hashlib.sha256(json.dumps(once).encode()).hexdigest()
    rows = torch.split(torch.arange(len(once)), PART)
    return Texts(once, Store(cache, "texts", {"texts": fingerprint, **cache.key}).fill(rows, make))


def _filled(rows: Tensor, batch_size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield rows as batches of one size, and how many rows of each count; the last is filled up with its last row."""
    batch_size = min(batch_size, PART)
    for start in range(0, len(rows), batch_size):
        yield rows[torch.arange(start, start + batch_size).clamp(max=len(rows) - 1)], min(batch_size, len(rows) - start)


def _kept(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values.detach().to("cpu", dtype if values.is_floating_point() else values.dtype)


def _finite(part: Mapping[str, Tensor], names: Sequence[str], who: str, dtype: torch.dtype) -> None:
    """Refuse what would make the loss NaN hours later."""
    for name, one in part.items():
        bad = (~one.isfinite()).reshape(len(one), -1).any(dim=1).nonzero().flatten().tolist()
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            raise DataError(
                f"{who} gave a {name} that is not finite for {names[bad[0]]}{more} (kept as {dtype}): run it in "
                "float32, and check its weights"
            )


class Latents:
    """One side of a split, as the fit loop takes data: latents and texts of rows of one bucket make a batch.

    A batch's inputs are ``mean`` and ``logvar`` of the latents and whatever the texts have (``input_ids``, ...). Its
    labels are the numbers of the pictures, int64 of shape (batch,): validation seeds a picture's noise by its number.

    Args:
        pictures: all of them.
        moments: of all pictures, as `encode_pictures` gives them.
        texts: of all captions, as `encode_texts` gives them, or of the captions' tokens.
        rows: the numbers of the pictures on this side; None takes all.
        told: more inputs, by name, of all pictures: each of shape (pictures, ...).
    """

    apart = True

    def __init__(
        self,
        pictures: Pictures,
        moments: Values,
        texts: Texts,
        rows: Tensor | None = None,
        told: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.rows = torch.arange(len(pictures)) if rows is None else rows
        self.bucket, self.buckets = pictures.bucket[self.rows], len(pictures.sizes)
        self.moments, self.texts, self._told = moments, texts, Tensors(told or {})
        self.text = texts.rows([pictures.captions[row] for row in self.rows.tolist()])

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Tensor) -> Batch:
        """Return these rows of the side, all of one bucket, as a batch."""
        pictures = self.rows[rows]
        moments = self.moments.take(pictures)
        return Batch({"mean": moments["mean"], "logvar": moments["logvar"], **self.beside(rows)}, pictures)

    def beside(self, rows: Tensor) -> dict[str, Tensor]:
        """Return what these rows have besides their pictures."""
        return {**self._told.take(self.rows[rows]), **self.texts.take(self.text[rows])}

    def unfilled(self, batch_size: int, together: int = 1) -> int:
        """Return how many rows are in buckets that do not fill the batches of one step: training never sees them."""
        counts = self.bucket.bincount()
        return int(counts[counts < min(batch_size, len(self)) * together].sum())
