"""Load captioned pictures as the settings of the group ``pictures`` say."""

from __future__ import annotations

import hashlib
import json
import math
from typing import TYPE_CHECKING

import torch

from hotloop.errors import DataError
from hotloop.recipes.diffusion.pictures import buckets, embedded, folder
from hotloop.train.folds import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from hotloop.recipes.diffusion.pictures.source import Source
    from hotloop.train.settings import Settings


class Pictures:
    """Captioned pictures, each in a bucket: a size that it is brought to.

    Args:
        source: the pictures.
        rows: which of the source's pictures are taken, in this order.
        plan: the sizes, and which of them each of the rows gets.

    Attributes:
        names: one a picture, for messages.
        captions: one a picture.
        labels: a class number a picture, or None where there are no classes.
        prompts: the plainest caption of each class, by its number; empty where there are no classes.
        sizes: height and width of each bucket in pixels, smallest area first.
        bucket: the index of each picture's size, int64 of shape (pictures,).
        channels: 1 for grey, 3 for colours.
        notes: what a reader should be told, such as pictures that were left out.
    """

    def __init__(self, source: Source, rows: Sequence[int], plan: buckets.Plan) -> None:
        self._reader, self._rows, self._cut = source.reader, list(rows), plan.cut
        self.names = [source.names[row] for row in rows]
        self.captions = [source.captions[row] for row in rows]
        self.labels = None if source.labels is None else [source.labels[row] for row in rows]
        self.prompts, self.notes = source.prompts, source.notes
        self.sizes, self.bucket = plan.sizes, plan.bucket
        self._shapes = torch.tensor([source.shapes[row] for row in rows]).reshape(-1, 2)
        self.channels = source.reader.channels

    def __len__(self) -> int:
        return len(self.names)

    def pixels(self, rows: Tensor) -> Tensor:
        """Return pictures of one bucket, float32 of shape (rows, channels, height, width) in -1..1.

        A folder's pictures are decoded here, each time: none is kept in memory.

        Args:
            rows: row numbers, int64 of shape (rows,); at least one.

        Raises:
            ValueError: the rows are of several buckets, or none.
            DataError: a file is no longer what it was when the pictures were loaded.
        """
        which = set(self.bucket[rows].tolist())
        if len(which) != 1:
            raise ValueError(f"pixels: expected rows of one bucket, got rows of {len(which)}")
        height, width = self.sizes[which.pop()]
        return self._reader.read([self._rows[row] for row in rows.tolist()], height, width)

    def framing(self) -> Tensor:
        """Return each picture's height and width as it was, what is cut off above and on the left, and its new size.

        SDXL is told of them, so that it learns no small pictures enlarged and no cut heads (Podell et al. 2023,
        arXiv:2307.01952). The cut is in pixels of the resized picture, whose middle is kept.

        Returns:
            float32 of shape (pictures, 6).
        """
        wanted = torch.tensor(self.sizes)[self.bucket]
        resized = self._shapes * (wanted / self._shapes).amax(dim=1, keepdim=True)
        return torch.cat([self._shapes, ((resized - wanted) / 2).round(), wanted], dim=1).float()

    def fingerprint(self) -> str:
        """Return a text that changes with the bytes of any picture, with any caption, and with the pictures' sizes."""
        told = [self.names, self.captions, self.labels, self.sizes, self.bucket.tolist(), self.channels]
        return hashlib.sha256((json.dumps(told) + self._reader.digest(self._rows)).encode()).hexdigest()

    def describe(self) -> str:
        """Say how many pictures there are in which sizes, and how much of them is cut off."""
        counts = self.bucket.bincount(minlength=len(self.sizes)).tolist()
        sizes = ", ".join(f"{wide} x {high}: {many}" for (high, wide), many in zip(self.sizes, counts, strict=True))
        text = f"{len(self)} pictures ({'grey' if self.channels == 1 else 'colour'}); width x height: {sizes}"
        if (lost := float(self._cut.max())) > 0:
            text += f"; cropping takes {float(self._cut.mean()):.0%} of a picture on average, {lost:.0%} at most"
        return text


def load(settings: Settings, progress: Callable[[int, int], None] | None = None) -> Pictures:
    """Load the pictures that the settings name: all of a folder are looked at before any is used.

    Reads the group ``pictures``, ``data.sample_size``, ``data.validation_fraction`` and ``kfold.n_splits`` (how many
    pictures a bucket needs so that its training side fills the batches of a step), ``training.batch_size``,
    ``training.gradient_accumulation`` and ``run.seed``.

    Args:
        settings: the run's.
        progress: is told how many pictures have been looked at, and of how many.

    Raises:
        DataError: pictures that cannot be used, listed by name with the reason; or none is left.
    """
    source = _source(settings, progress)
    rows = sample(range(len(source.names)), settings.data.sample_size, settings.run.seed)
    if not rows:
        raise DataError(f"pictures.source={settings.pictures.source}: there is no picture to train on")
    chosen, least = settings.pictures, needed(settings)
    shapes = [source.shapes[row] for row in rows]
    return Pictures(source, rows, buckets.plan(shapes, chosen.size, chosen.step, chosen.buckets, least))


def needed(settings: Settings) -> int:
    """Return how many pictures a bucket needs, so that about those of a step are on the training side of a split."""
    folds = settings.kfold.n_splits
    held_out = 1 / folds if folds else settings.data.validation_fraction
    return math.ceil(settings.training.batch_size * settings.training.gradient_accumulation / (1 - held_out))


def _source(settings: Settings, progress: Callable[[int, int], None] | None) -> Source:
    chosen, seed = settings.pictures, settings.run.seed
    if chosen.source == "digits":
        return embedded.digits(seed)
    assert chosen.path is not None
    return folder.load(chosen.path, chosen.min_size, skip_bad=chosen.skip_bad, progress=progress)
