"""What every source of pictures gives: names, captions, sizes, and a reader of pixels."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Reader(Protocol):
    """Gives pixels on demand."""

    channels: int

    def read(self, rows: Sequence[int], height: int, width: int) -> Tensor:
        """Return pictures, float32 of shape (rows, channels, height, width) in -1..1."""

    def digest(self, rows: Sequence[int]) -> str:
        """Return a text that changes with the bytes of any of these pictures, or with their order."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Pictures before they are brought to a size.

    Args:
        names: for messages; no two are the same.
        captions: one a picture.
        labels: a class number a picture, or None where there are no classes.
        prompts: the plainest caption of each class, by its number; empty where there are no classes.
        shapes: height and width of each picture as it is seen, in pixels.
        reader: gives the pixels.
        notes: what a reader should be told about the source.
    """

    names: list[str]
    captions: list[str]
    labels: list[int] | None
    prompts: tuple[str, ...]
    shapes: list[tuple[int, int]]
    reader: Reader
    notes: tuple[str, ...] = ()


class Held:
    """Pictures of one size that are held in memory.

    Args:
        pixels: uint8 of shape (pictures, channels, height, width).
        brightest: the value that becomes 1; 0 becomes -1.
    """

    def __init__(self, pixels: Tensor, brightest: int) -> None:
        self.pixels, self.brightest, self.channels = pixels, brightest, pixels.shape[1]

    def read(self, rows: Sequence[int], height: int, width: int) -> Tensor:
        """Return pictures, float32 of shape (rows, channels, height, width) in -1..1."""
        pixels = self.pixels[list(rows)].float() * (2 / self.brightest) - 1
        if pixels.shape[-2:] != (height, width):
            # A cubic overshoots at edges, so what is out of range is brought back.
            pixels = functional.interpolate(pixels, (height, width), mode="bicubic", antialias=True).clamp(-1, 1)
        return pixels

    def digest(self, rows: Sequence[int]) -> str:
        """Return a text that changes with the bytes of any of these pictures, or with their order."""
        pixels = self.pixels[list(rows)].contiguous()
        return hashlib.sha256(repr((pixels.shape, self.brightest)).encode() + pixels.numpy().tobytes()).hexdigest()
