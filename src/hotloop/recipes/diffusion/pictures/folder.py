"""A folder of the user's own, in the convention that trainers share: images, each with a .txt of the same name.

Everything is looked at before anything is trained, each file decoded to its end, and what cannot be used is listed by
name with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import unicodedata
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hotloop.errors import DataError
from hotloop.recipes.diffusion.pictures.decode import MOST_BYTES, SUFFIXES, UnusableError, at_once, fitted, upright
from hotloop.recipes.diffusion.pictures.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CAPTION = ".txt"
MOST_CAPTION = 2**16
"""Bytes of a caption."""
LISTED = 1000
"""Pictures that cannot be used and are named: all that anybody would mend by hand."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A picture that can be used: where it is, its caption, its height and width, and its file's SHA-256."""

    path: Path
    caption: str
    shape: tuple[int, int]
    digest: str


@dataclasses.dataclass(frozen=True)
class Bad:
    """A picture that cannot be used, and why."""

    name: str
    reason: str


class Files:
    """Pictures that are decoded when they are asked for.

    Args:
        root: the folder.
        found: the pictures in it.
    """

    channels = 3

    def __init__(self, root: Path, found: Sequence[Found]) -> None:
        self.root, self.found = root, list(found)

    def read(self, rows: Sequence[int], height: int, width: int) -> Tensor:
        """Return pictures, float32 of shape (rows, 3, height, width) in -1..1.

        Raises:
            DataError: a file is gone, or another one than when the folder was looked at.
        """

        def one(row: int) -> Tensor:
            found = self.found[row]
            try:
                data = _bytes(found.path, MOST_BYTES)
            except UnusableError as error:
                raise DataError(_changed(f"{shown(found.path, self.root)} {error}")) from error
            if hashlib.sha256(data).hexdigest() != found.digest:
                raise DataError(_changed(shown(found.path, self.root)))
            return fitted(upright(data), height, width)

        return torch.stack(list(at_once(one, rows)))

    def digest(self, rows: Sequence[int]) -> str:
        """Return a text that changes with the bytes of any of these pictures, or with their order."""
        return hashlib.sha256("".join(self.found[row].digest for row in rows).encode()).hexdigest()


def _changed(what: str) -> str:
    return f"{what}: it was another file when the run began; leave pictures.path as it is while a run uses it"


def load(path: str, min_size: int, *, skip_bad: bool, progress: Callable[[int, int], None] | None = None) -> Source:
    """Look at every picture of a folder and of its subfolders.

    Files and folders whose names begin with a dot are left aside, as are files of other kinds.

    Args:
        path: the folder.
        min_size: the fewest pixels that a picture's shorter side may have.
        skip_bad: leave out what cannot be used, and say so, instead of raising.
        progress: is told how many pictures have been looked at, and of how many.

    Raises:
        DataError: no such folder, no pictures, or some that cannot be used.
    """
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        what = "this is a file, expected a folder of pictures" if root.exists() else "no such folder"
        raise DataError(f"pictures.path={path}: {what}")
    images = _images(root)
    bad: list[Bad] = []
    found: list[Found] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow only warns of (a large picture, odd EXIF) is judged here
        # Closed at once, so that who interrupts need not wait for the other thousands.
        with contextlib.closing(at_once(lambda one: _examine(root, one, min_size), images)) as looked_at:
            for count, one in enumerate(looked_at, start=1):
                (bad if isinstance(one, Bad) else found).append(one)  # type: ignore[arg-type]
                if progress:
                    progress(count, len(images))
    bad.sort(key=lambda one: one.name)
    if bad and not (skip_bad and found):
        small = f"; pictures.min_size={min_size} is the least that a side may have, lower it for smaller pictures"
        remedy = (
            "Mend these, or leave them out with pictures.skip_bad=true"
            if found
            else f"None can be used{small if any('pictures.min_size' in one.reason for one in bad) else ''}"
        )
        raise DataError(f"{listing(path, bad)}\n{remedy}")
    if not found:
        raise DataError(f"pictures.path={path} has no pictures: expected {', '.join(SUFFIXES)}, each with a .txt")
    notes = [f"left out {listing(path, bad)}"] if bad else []
    copies = len(found) - len({one.digest for one in found})
    if copies:
        notes.append(f"copies of other pictures, byte for byte: {copies}; they may be on both sides of a split")
    return Source(
        names=[shown(one.path, root) for one in found],
        captions=[one.caption for one in found],
        labels=None,
        prompts=(),
        shapes=[one.shape for one in found],
        reader=Files(root, found),
        notes=tuple(notes),
    )


def shown(path: Path, root: Path) -> str:
    """Return a path below the folder as one line of plain text: no sign of a file's name may steer a terminal."""
    text = os.fsencode(path.relative_to(root).as_posix()).decode(errors="backslashreplace")
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def listing(path: str, bad: Sequence[Bad]) -> str:
    """Put what cannot be used into lines, at most `LISTED` of them."""
    lines = [f"{len(bad)} pictures of {path} that cannot be used:"]
    lines += [f"  {one.name}: {one.reason}" for one in bad[:LISTED]]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED} more")
    return "\n".join(lines)


def _images(root: Path) -> list[Path]:
    """Find the image files, in the order of their names; what begins with a dot is left aside."""
    found = []
    for place, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        kept = sorted(name for name in files if not name.startswith("."))
        found += [Path(place, name) for name in kept if Path(name).suffix.lower() in SUFFIXES]
    return found


def _examine(root: Path, path: Path, min_size: int) -> Found | Bad:
    try:
        data = _bytes(path, MOST_BYTES)
        image = upright(data)
        text = _caption(root, path.with_suffix(CAPTION))
    except UnusableError as error:
        return Bad(shown(path, root), str(error))
    if min(image.size) < min_size:
        reason = f"has {image.width} x {image.height} pixels, fewer than pictures.min_size={min_size}"
        return Bad(shown(path, root), reason)
    return Found(path, text, (image.height, image.width), hashlib.sha256(data).hexdigest())


def _bytes(path: Path, most: int) -> bytes:
    """Read a plain file of bounded size: a pipe would be waited for, for ever."""
    if not path.is_file():
        raise UnusableError("is no plain file, or a link to nothing")
    if path.stat().st_size > most:
        raise UnusableError(f"has more than {most:,} bytes")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UnusableError(f"cannot be read: {error.strerror}") from error


def _caption(root: Path, path: Path) -> str:
    """Read the caption as one line: white space, line breaks among it, becomes single blanks."""
    name = shown(path, root)
    if not path.exists():
        raise UnusableError(f"has no caption: expected {name}")
    try:
        text = " ".join(_bytes(path, MOST_CAPTION).decode("utf-8-sig").split())
    except UnusableError as error:
        raise UnusableError(f"has a caption, {name}, that {error}") from error
    except UnicodeDecodeError as error:
        raise UnusableError(f"has a caption, {name}, that is not UTF-8 ({error.reason})") from error
    if any(unicodedata.category(sign) == "Cc" for sign in text):  # a text of zero bytes is UTF-16
        raise UnusableError(f"has a caption, {name}, with a control character: expected text in UTF-8")
    if not text:
        raise UnusableError(f"has an empty caption, {name}")
    return text
