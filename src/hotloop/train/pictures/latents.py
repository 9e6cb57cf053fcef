"""What a VAE and a text encoder give for all pictures and captions, kept on disk, and batches of it.

A VAE is run over each picture once, and not in each epoch. What is kept are the parameters of its posterior, so that
training can draw from it anew each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from hotloop.train.batches import Batch

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from hotloop.train.pictures.loading import Pictures

EncodePictures = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Takes pictures, float32 of shape (batch, channels, height, width) in -1..1 on the CPU; gives the mean and the logarithm
of the variance of their latents, both of shape (batch, latent channels, latent height, latent width), on any device."""
EncodeTexts = Callable[[Sequence[str]], Mapping[str, Tensor]]
"""Takes texts; gives tensors by the names that the model's inputs have, each of shape (batch, ...), on any device."""
Progress = Callable[[int, int], None]
"""Is told how many rows are done, and of how many."""


class Values(Protocol):
    """Tensors of rows, by name."""

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Give these rows, each tensor of shape (rows, ...) on the CPU; ``rows`` is int64 of shape (rows,)."""


class Tensors:
    """Values that are held in memory, such as the tokens of captions.

    Args:
        values: by name, each of shape (rows, ...).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = dict(values)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Give these rows."""
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
        """Give the row of each of these texts, int64 of shape (texts,).

        Raises:
            KeyError: a text that is not among them.
        """
        raise NotImplementedError

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Give the values of these rows, each of shape (rows, ...)."""
        return self.values.take(rows)


def distinct(texts: Sequence[str]) -> list[str]:
    """Give each text once, in the order in which they first come."""
    return list(dict.fromkeys(texts))


def weights_fingerprint(module: nn.Module) -> str:
    """Give a text that changes with any weight or buffer of a module, with its class, and with its configuration.

    The configuration is that of diffusers and transformers, ``module.config``, without names of folders and versions.
    """
    raise NotImplementedError


def encode_pictures(
    pictures: Pictures,
    encode: EncodePictures,
    folder: Path,
    *,
    key: Mapping[str, str],
    batch_size: int,
    dtype: torch.dtype,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Values:
    """Encode all pictures, bucket by bucket, or read what an earlier run encoded.

    Every batch has ``batch_size`` rows, the last of a bucket filled up, so that a compiled VAE is compiled for each
    bucket once. A run that is killed leaves whole parts only, which the next one reuses.

    Args:
        pictures: what to encode.
        encode: the VAE's part; is called without gradients, and must not draw anything random.
        folder: where caches are kept.
        key: what the result depends on besides the pictures, by name: ``{"vae": weights_fingerprint(vae)}``.
        batch_size: pictures in a forward pass.
        dtype: in which the result is kept.
        progress: is told how many pictures are done, and of how many.
        say: is told in words what is reused, rebuilt and thrown away.

    Returns:
        ``mean`` and ``logvar`` by picture, of shape (rows, latent channels, latent height, latent width) for rows of
        one bucket.

    Raises:
        DataError: the VAE gave a number that is not finite for a picture; the message names it.
        OSError: the cache cannot be written.
    """
    raise NotImplementedError


def encode_texts(
    texts: Sequence[str],
    encode: EncodeTexts,
    folder: Path,
    *,
    key: Mapping[str, str],
    batch_size: int,
    dtype: torch.dtype,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> Texts:
    """Encode each distinct text once, or read what an earlier run encoded; arguments as for `encode_pictures`.

    Args:
        texts: captions, and whatever else is to be embedded, such as the empty text and the prompts of samples.
        encode: the text encoder's part, its tokenizer included; is called without gradients. Numbers with a fraction
            are kept in ``dtype``, others as they are.
        folder: where caches are kept.
        key: what the result depends on besides the texts: the encoder's weights, and its tokenizer.
        batch_size: texts in a forward pass.
        dtype: in which the result is kept.
        progress: is told how many texts are done, and of how many.
        say: is told in words what is reused, rebuilt and thrown away.
    """
    raise NotImplementedError


class Latents:
    """One side of a split, as the fit loop takes data: latents and texts of rows of one bucket make a batch.

    A batch's inputs are ``mean`` and ``logvar`` of the latents and whatever the texts have (``input_ids``, ...). Its
    labels are the numbers of the pictures, int64 of shape (batch,): validation seeds a picture's noise by its number.

    Args:
        pictures: all of them.
        moments: of all pictures, as `encode_pictures` gives them.
        texts: of all captions, as `encode_texts` gives them, or of the captions' tokens.
        rows: the numbers of the pictures on this side; None takes all.
    """

    apart = True

    def __init__(self, pictures: Pictures, moments: Values, texts: Texts, rows: Tensor | None = None) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, rows: Tensor) -> Batch:
        """Give these rows of the side, all of one bucket, as a batch."""
        raise NotImplementedError

    def unfilled(self, batch_size: int) -> int:
        """Give how many rows are in buckets that do not fill a batch: training never sees them."""
        raise NotImplementedError
