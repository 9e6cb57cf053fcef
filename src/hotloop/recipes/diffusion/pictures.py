"""Captioned pictures of a folder: images, each with a .txt of the same name, brought to a few sizes.

Each file is decoded before anything is trained, so that one that cannot be used is known by name then.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.errors import DataError
from hotloop.recipes.diffusion import buckets
from hotloop.train.folds import sample
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotloop.train.settings import Settings

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""The decoders that a file may reach, whatever its name says; Pillow has others, some of which start programs."""
MOST_BYTES = 2**28
"""Of a file."""
LISTED = 20
"""Pictures that cannot be used and are named."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture that can be used: its name, its caption, height and width, and its file's size and time."""

    path: Path
    name: str
    caption: str
    shape: tuple[int, int]
    stamp: tuple[int, int]


class Pictures:
    """Captioned pictures, each in a bucket: a size that it is brought to.

    Args:
        found: the pictures.
        plan: the sizes, and which of them each picture gets.
        notes: what a reader should be told, such as pictures that were left out.

    Attributes:
        names: one a picture, for messages.
        captions: one a picture.
        sizes: height and width of each bucket in pixels, smallest area first.
        bucket: the index of each picture's size, int64 of shape (pictures,).
    """

    def __init__(self, found: Sequence[Picture], plan: buckets.Plan, notes: Sequence[str] = ()) -> None:
        self.found, self.notes, self._cut = list(found), tuple(notes), plan.cut
        self.names = [one.name for one in found]
        self.captions = [one.caption for one in found]
        self.sizes, self.bucket = plan.sizes, plan.bucket

    def __len__(self) -> int:
        return len(self.found)

    def pixels(self, rows: Tensor) -> Tensor:
        """Decode pictures of one bucket; none is kept in memory.

        Args:
            rows: row numbers, int64 of shape (rows,); at least one.

        Returns:
            float32 of shape (rows, 3, height, width) in -1..1.

        Raises:
            DataError: a file cannot be read any more.
        """
        height, width = self.sizes[int(self.bucket[rows[0]])]

        def decoded(row: int) -> Tensor:
            one = self.found[row]
            try:
                return fitted(upright(one.path), height, width)
            except DataError as error:
                raise DataError(f"{one.name} {error}; leave pictures.path as it is while a run uses it") from error

        with ThreadPoolExecutor() as pool:
            return torch.stack(list(pool.map(decoded, rows.tolist())))

    def framing(self) -> Tensor:
        """Return each picture's height and width as it was, what is cut off above and on the left, and its new size.

        SDXL is told of them, so that it learns no small pictures enlarged and no cut heads (Podell et al. 2023,
        arXiv:2307.01952). The cut is in pixels of the resized picture, whose middle is kept.

        Returns:
            float32 of shape (pictures, 6).
        """
        shapes = torch.tensor([one.shape for one in self.found])
        wanted = torch.tensor(self.sizes)[self.bucket]
        resized = shapes * (wanted / shapes).amax(dim=1, keepdim=True)
        return torch.cat([shapes, ((resized - wanted) / 2).round(), wanted], dim=1).float()

    def fingerprint(self) -> str:
        """Return a text that changes with a picture's name, bytes or caption, and with the pictures' sizes."""
        told = [(one.name, one.caption, one.shape, one.stamp[0]) for one in self.found]
        return hashlib.sha256(json.dumps([told, self.sizes, self.bucket.tolist()]).encode()).hexdigest()

    def describe(self) -> str:
        """Say how many pictures there are in which sizes, and how much of them is cut off."""
        counts = self.bucket.bincount(minlength=len(self.sizes)).tolist()
        sizes = ", ".join(f"{wide} x {high}: {many}" for (high, wide), many in zip(self.sizes, counts, strict=True))
        text = f"{len(self)} pictures; width x height: {sizes}"
        if (lost := float(self._cut.max())) > 0:
            text += f"; cropping takes {float(self._cut.mean()):.0%} of a picture on average, {lost:.0%} at most"
        return text


def load(settings: Settings) -> Pictures:
    """Look at every picture of ``pictures.path`` and of its subfolders, and plan their sizes.

    Names that begin with a dot are left aside, as are files of other kinds.

    Raises:
        DataError: no such folder, no pictures, or some that cannot be used, with the reasons.
    """
    chosen = settings.pictures
    root = Path(chosen.path or "").expanduser().resolve()
    if not chosen.path or not root.is_dir():
        raise DataError(f"pictures.path={chosen.path or 'null'}: expected a folder of pictures, each with a .txt")
    paths = [path for path in sorted(root.rglob("*")) if path.suffix.lower() in SUFFIXES and not _hidden(root, path)]
    require("PIL.Image", "recipe=diffusion", "diffusion").init()  # registers the decoders, which no thread may begin
    with ThreadPoolExecutor() as pool:
        looked_at = list(pool.map(lambda path: _examine(root, path, chosen.min_size), paths))
    bad = [one for one in looked_at if isinstance(one, str)]
    found = [one for one in looked_at if isinstance(one, Picture)]
    more = [f"and {len(bad) - LISTED} more"] if len(bad) > LISTED else []
    listing = "\n  ".join([f"{len(bad)} pictures of {chosen.path} that cannot be used:", *bad[:LISTED], *more])
    if bad and not (chosen.skip_bad and found):
        raise DataError(f"{listing}\nMend these, or leave them out with pictures.skip_bad=true")
    if not found:
        raise DataError(
            f"pictures.path={chosen.path} has no pictures: expected {', '.join(SUFFIXES)}, each with a .txt"
        )
    taken = [found[row] for row in sample(range(len(found)), settings.data.sample_size, settings.run.seed)]
    shapes = [one.shape for one in taken]
    plan = buckets.plan(shapes, chosen.size, chosen.step, chosen.buckets, needed(settings))
    return Pictures(taken, plan, [f"left out {listing}"] if bad else [])


def needed(settings: Settings) -> int:
    """Return how many pictures a bucket needs, so that about those of a step are on the training side of a split."""
    folds = settings.kfold.n_splits
    held_out = 1 / folds if folds else settings.data.validation_fraction
    return math.ceil(settings.training.batch_size * settings.training.gradient_accumulation / (1 - held_out))


def upright(path: Path) -> Any:
    """Decode a picture as it is meant to be seen: turned as its EXIF says, in three colours, transparency over white.

    Raises:
        DataError: it is no image, or torn; or far too large, a decompression bomb.
    """
    pillow = require("PIL.Image", "recipe=diffusion", "diffusion")
    operations = require("PIL.ImageOps", "recipe=diffusion", "diffusion")
    try:
        with pillow.open(path, formats=FORMATS) as file:
            image = operations.exif_transpose(file)
    except Exception as error:  # Pillow's decoders raise anything from SyntaxError to struct.error for a torn file
        raise DataError(f"cannot be read: {str(error)[:200] or type(error).__name__}") from error
    if image.mode[0] in "IF":
        raise DataError("has more than 8 bits of grey, which would be cut off")
    if not image.has_transparency_data:
        return image.convert("RGB")
    clear = image.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", clear.size, "white"), clear).convert("RGB")


def fitted(image: Any, height: int, width: int) -> Tensor:
    """Resize a picture to cover a size, and cut off evenly what stands over.

    Returns:
        float32 of shape (3, height, width) in -1..1.
    """
    import numpy as np  # noqa: PLC0415 - comes with the optional packages

    operations = require("PIL.ImageOps", "recipe=diffusion", "diffusion")
    resampling = require("PIL.Image", "recipe=diffusion", "diffusion").Resampling.LANCZOS
    made = np.array(operations.fit(image, (width, height), method=resampling))
    return torch.from_numpy(made).permute(2, 0, 1).float() / (255 / 2) - 1


def _hidden(root: Path, path: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _examine(root: Path, path: Path, min_size: int) -> Picture | str:
    """Return a picture, or a line that names it with the reason why it cannot be used."""
    # As one line of plain text: no sign of a file's name may steer a terminal.
    name = ascii(os.fsencode(path.relative_to(root)).decode(errors="backslashreplace"))[1:-1]
    if not path.is_file() or (file := path.stat()).st_size > MOST_BYTES:  # a pipe would be waited for, for ever
        return f"{name}: is no plain file, or too large"
    try:
        image = upright(path)
        caption = _caption(path.with_suffix(".txt"))
    except (OSError, DataError, UnicodeDecodeError) as error:
        return f"{name}: {error}"
    if min(image.size) < min_size:
        return f"{name}: has {image.width} x {image.height} pixels, fewer than pictures.min_size={min_size} a side"
    return Picture(path, name, caption, (image.height, image.width), (file.st_size, file.st_mtime_ns))


def _caption(path: Path) -> str:
    """Read a caption as one line."""
    text = " ".join(path.read_text(encoding="utf-8-sig").split()) if path.is_file() else ""
    if not text or not text.isprintable():
        raise DataError("has no caption: expected text in UTF-8, in a .txt of the same name")
    return text
