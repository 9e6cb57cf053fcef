"""A sheet of pictures with their captions, as a PNG."""

from __future__ import annotations

import os
import uuid
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CELL = 96
"""Pixels that a picture has across at least: below it, a caption of some words would not fit."""
GAP, LETTERS = 4, 11
"""Pixels between pictures, and of the height of letters."""
LINES = 2
"""Lines of a caption."""


def write_grid(path: Path, images: Tensor, captions: Sequence[str], columns: int) -> None:
    """Write pictures as one PNG, row by row, each over its caption; a file that was there stays whole until then.

    Args:
        path: of the PNG; its folder is made where it is missing.
        images: of shape (images, 1 or 3, height, width) in -1..1; what lies outside is cut. Small ones are
            enlarged by a whole factor. Where a number is not finite, the picture is red.
        captions: one an image; what does not fit below its picture is cut. Letters are Pillow's own, which are Latin.
        columns: pictures in a row.

    Raises:
        ValueError: no images, another number of captions, or of channels.
        OSError: the file cannot be written.
    """
    if images.ndim != 4 or not len(images) or images.shape[1] not in (1, 3):  # noqa: PLR2004 - as the message says
        raise ValueError(f"images: expected (images, 1 or 3, height, width), got {tuple(images.shape)}")
    if len(captions) != len(images) or columns < 1:
        raise ValueError(f"{len(images)} images, {len(captions)} captions, {columns} columns: expected a caption each")
    sheet = _sheet(_bytes(images), captions, min(columns, len(images)))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            sheet.save(file, format="PNG")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _bytes(images: Tensor) -> Tensor:
    """Return uint8 of shape (images, height, width, 3), enlarged where they are small."""
    colours = images.detach().float().cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
    red = torch.tensor([1.0, -1.0, -1.0])
    colours = torch.where(colours.isfinite().all(dim=-1, keepdim=True), colours, red)
    factor = max(1, CELL // colours.shape[2])
    pixels = ((colours.clamp(-1, 1) + 1) * (255 / 2)).round().to(torch.uint8)
    return pixels.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)


def _sheet(pixels: Tensor, captions: Sequence[str], columns: int) -> Any:
    pillow, draw, font = (
        require(f"PIL.{one}", "Sheets of samples", "diffusion") for one in ("Image", "ImageDraw", "ImageFont")
    )
    letters = font.load_default(LETTERS)
    many, high, wide = pixels.shape[:3]
    across, down = wide + GAP, high + (LINES + 1) * (LETTERS + 2)
    sheet = pillow.new("RGB", (columns * across + GAP, -(-many // columns) * down + GAP), "white")
    pen = draw.Draw(sheet)
    for index, (one, caption) in enumerate(zip(pixels, captions, strict=True)):
        left, top = GAP + index % columns * across, GAP + index // columns * down
        sheet.paste(pillow.fromarray(one.contiguous().numpy()), (left, top))
        pen.text((left, top + high + 2), _lines(caption, letters, wide), fill="black", font=letters, spacing=2)
    return sheet


def _lines(caption: str, letters: Any, wide: int) -> str:
    """Break a caption into at most `LINES` lines of a width in pixels, and cut what is left over."""
    lines = [""]
    for word in caption.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and len(lines) < LINES and letters.getlength(longer) > wide:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join(_cut(line, letters, wide) for line in lines)


def _cut(line: str, letters: Any, wide: int) -> str:
    text = line[:wide]  # no letter is narrower than a pixel
    if text == line and letters.getlength(text) <= wide:
        return line
    while text and letters.getlength(f"{text}...") > wide:
        text = text[:-1]
    return f"{text}..."
