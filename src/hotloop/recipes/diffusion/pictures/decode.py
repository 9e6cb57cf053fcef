"""Image files to pixels. Files are taken as hostile: few formats, bounded sizes, and whatever fails has a reason."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

T = TypeVar("T")
R = TypeVar("R")

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""The decoders that a file may reach, whatever its name says; Pillow has others, some of which start programs."""
MOST_PIXELS = 89_478_485
"""Of a picture: 256 MiB as colours, where Pillow itself begins to warn of a decompression bomb."""
MOST_BYTES = 2**28
"""Of a file."""
THREADS = 8
"""Pictures that are decoded at once, each of which may take `MOST_PIXELS` of memory several times."""
_DEEP = 65535 / 255


class UnusableError(Exception):
    """Why a picture cannot be used, in words that follow its name."""


def upright(data: bytes) -> Any:
    """Decode a picture as it is meant to be seen: turned as its EXIF says, in three colours, transparency over white.

    16 bits of grey become 8. Of an animation the first picture is taken. Colour profiles are not applied.

    Args:
        data: the whole file.

    Returns:
        A Pillow image of mode RGB.

    Raises:
        UnusableError: it is no image, torn, or too large.
    """
    pillow, operations = _pillow(), require("PIL.ImageOps", "pictures.source=folder", "diffusion")
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as file:
            _bounded(file.width * file.height)  # known of the header, before anything is unpacked
            file.load()
            return _coloured(operations.exif_transpose(file))
    except UnusableError:
        raise
    except pillow.DecompressionBombError as error:
        raise UnusableError(
            f"has far more than {MOST_PIXELS:,} pixels: a decompression bomb, or to be shrunk"
        ) from error
    except pillow.UnidentifiedImageError as error:
        raise UnusableError(f"is not readable as {', '.join(FORMATS)}") from error
    except Exception as error:  # Pillow's decoders raise anything from SyntaxError to struct.error for a torn file
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UnusableError(f"cannot be read: {reason}") from error


def _bounded(pixels: int) -> None:
    if pixels > MOST_PIXELS:
        raise UnusableError(f"has {pixels:,} pixels, more than {MOST_PIXELS:,}: a decompression bomb, or to be shrunk")


def _pillow() -> Any:
    return require("PIL.Image", "pictures.source=folder", "diffusion")


def _coloured(image: Any) -> Any:
    """Return an image as RGB; where it is transparent it becomes white."""
    pillow = _pillow()
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would cut off at 255
        import numpy as np  # noqa: PLC0415 - comes with the optional packages

        image = pillow.fromarray((np.asarray(image) / _DEEP).clip(0, 255).round().astype("uint8"))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def fitted(image: Any, height: int, width: int) -> Tensor:
    """Resize a picture to cover a size, and cut off evenly what stands over.

    Returns:
        float32 of shape (3, height, width) in -1..1.
    """
    import numpy as np  # noqa: PLC0415 - comes with the optional packages

    operations = require("PIL.ImageOps", "pictures.source=folder", "diffusion")
    made = operations.fit(image, (width, height), method=_pillow().Resampling.LANCZOS)
    return torch.from_numpy(np.array(made)).permute(2, 0, 1).float() / (255 / 2) - 1


def at_once(function: Callable[[T], R], items: Iterable[T]) -> Generator[R]:
    """Yield a function's results in order, a few computed at once: Pillow decodes without Python's lock."""
    _pillow().init()  # the decoders are registered once, and not by several threads
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(function, items)
