"""Says whether made pictures show what they were to show: a simple classifier, trained on real ones."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.recipes.diffusion.pictures.loading import Pictures

HELD_OUT = 0.25
MOST = 8000
"""Pictures to train on and to be judged by: the time that a support vector machine takes grows with their square."""
Z = 1.959964
"""How many standard errors 95% of a normal distribution lie within."""


@dataclasses.dataclass(frozen=True)
class Share:
    """So many right of so many, with Wilson's 95% interval."""

    right: int
    total: int

    @property
    def value(self) -> float:
        """The share that is right, 0 to 1."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the interval, 0 to 1: E. B. Wilson, Probable Inference, J. Am. Stat. Assoc. 22 (1927) 209-212."""
        whole = 1 + Z**2 / self.total
        middle = (self.value + Z**2 / (2 * self.total)) / whole
        half = Z / whole * math.sqrt(self.value * (1 - self.value) / self.total + Z**2 / (4 * self.total**2))
        return max(0.0, middle - half), min(1.0, middle + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right} of {self.total}: {self.value:.3f} (95% interval {low:.3f} to {high:.3f})"


@dataclasses.dataclass(frozen=True)
class Recogniser:
    """A classifier, the size of the pictures that it reads, and how well it reads real ones that were held out."""

    classifier: Any
    shape: tuple[int, ...]
    held_out: Share

    def read(self, images: Tensor) -> list[int]:
        """Return the class that each picture seems to show.

        Args:
            images: of shape (images, channels, height, width) in -1..1, of the size that it was trained on.

        Raises:
            ValueError: pictures of another size, or numbers that are not finite.
        """
        if tuple(images.shape[1:]) != self.shape or not images.isfinite().all():
            raise ValueError(f"expected finite pictures of shape {self.shape}, got {tuple(images.shape[1:])}")
        return [int(one) for one in self.classifier.predict(_flat(images))]

    def judge(self, images: Tensor, labels: Sequence[int]) -> Share:
        """Return the share of pictures that show what they were to show, one label an image."""
        return Share(sum(a == b for a, b in zip(self.read(images), labels, strict=True)), len(labels))


def train(pictures: Pictures, seed: int) -> Recogniser:
    """Train a classifier on real pictures of one size, at that size, and judge it by a quarter of them.

    The classifier is scikit-learn's support vector machine with its own settings. Of many pictures, `MOST` are drawn.

    Args:
        pictures: with labels.
        seed: which are drawn, and which are held out.

    Raises:
        ValueError: pictures without labels, or of several sizes.
    """
    if pictures.labels is None or len(pictures.sizes) > 1:
        raise ValueError("a recogniser needs pictures with labels, of one size")
    svm = require("sklearn.svm", "Recognising samples")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pictures), generator=generator)[:MOST]
    images, labels = pictures.pixels(order), [pictures.labels[row] for row in order.tolist()]
    held = max(1, round(HELD_OUT * len(order)))
    classifier = svm.SVC().fit(_flat(images[held:]), labels[held:])
    read = classifier.predict(_flat(images[:held])).tolist()
    right = sum(a == b for a, b in zip(read, labels[:held], strict=True))
    return Recogniser(classifier, tuple(images.shape[1:]), Share(right, held))


def _flat(images: Tensor) -> Any:
    return images.detach().float().cpu().clamp(-1, 1).flatten(1).numpy()
