"""A sheet of pictures with their captions, as a PNG."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor


def write_grid(path: Path, images: Tensor, captions: Sequence[str], columns: int) -> None:
    """Write pictures as one PNG, row by row, each over its caption; a file that was there stays whole until then.

    Args:
        path: of the PNG; its folder is made where it is missing.
        images: of shape (images, 1 or 3, height, width) in -1..1; what lies outside is cut. Small ones are enlarged by a
            whole factor.
        captions: one an image; what does not fit below its picture is cut.
        columns: pictures in a row.

    Raises:
        ValueError: no images, or another number of captions.
        OSError: the file cannot be written.
    """
    raise NotImplementedError
