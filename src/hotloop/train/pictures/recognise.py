"""Says whether made pictures show what they were to show: a simple classifier, trained on real ones."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hotloop.train.pictures.loading import Pictures


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
        raise NotImplementedError

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.right} of {self.total}: {self.value:.3f} (95% interval {low:.3f} to {high:.3f})"


@dataclasses.dataclass(frozen=True)
class Recogniser:
    """A classifier, and how well it reads real pictures that it was not trained on."""

    classifier: Any
    held_out: Share

    def read(self, images: Tensor) -> list[int]:
        """Give the class that each picture seems to show.

        Args:
            images: of shape (images, channels, height, width) in -1..1, of the size that it was trained on.
        """
        raise NotImplementedError

    def judge(self, images: Tensor, labels: Sequence[int]) -> Share:
        """Give the share of pictures that show what they were to show."""
        raise NotImplementedError


def train(pictures: Pictures, seed: int) -> Recogniser:
    """Train a classifier on real pictures of one size, at that size, and judge it by a quarter of them.

    Args:
        pictures: with labels.
        seed: which are held out.

    Raises:
        ValueError: pictures without labels, or of several sizes.
    """
    raise NotImplementedError
