"""A folder of the user's own, in the convention that trainers share: images, each with a .txt of the same name.

Everything is looked at before anything is trained, each file decoded to its end, and what cannot be used is listed by
name with the reason.
"""

from __future__ import annotations

import collections
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
    from collections.abc import Callable, Iterator, Sequence

CAPTION = ".txt"
MOST_CAPTION = 2**16
"""Bytes of a caption."""
LISTED = 1000
"""Pictures that cannot be used and are named: all that anybody would mend by hand."""
KINDS = 5
"""Kinds of files left aside that are named, the most frequent ones."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """An image file that was found, and the files of its name that could be its caption."""

    image: Path
    captions: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """A picture that can be used: where it is, its caption, its height and width, and its file's SHA-256."""

    path: Path
    caption: str
    shape: tuple[int, int]
    digest: str


@dataclasses.dataclass(frozen=True)
class Bad:
    """A picture, or a link, that cannot be used, and why."""

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
                data = _bytes(self.root, found.path, MOST_BYTES)
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

    Files and folders whose names begin with a dot are left aside, as are files of other kinds. A link is followed to a
    file inside of the folder only: what comes with pictures from elsewhere could point anywhere.

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
    candidates, bad, others = _walk(root)
    found: list[Found] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow only warns of (a large picture, odd EXIF) is judged here
        # Closed at once, so that who interrupts need not wait for the other thousands.
        with contextlib.closing(at_once(lambda one: _examine(root, one, min_size), candidates)) as looked_at:
            for count, one in enumerate(looked_at, start=1):
                (bad if isinstance(one, Bad) else found).append(one)  # type: ignore[arg-type]
                if progress:
                    progress(count, len(candidates))
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
        kinds = f" ({others})" if others else ""
        raise DataError(
            f"pictures.path={path} has no pictures: expected {', '.join(SUFFIXES)}, each with a .txt{kinds}"
        )
    notes = [f"left out {listing(path, bad)}"] if bad else []
    notes += [f"files of other kinds are left aside: {others}"] if others else []
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
    return _plain(path.relative_to(root).as_posix())


def _plain(name: str) -> str:
    text = os.fsencode(name).decode(errors="backslashreplace")
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def listing(path: str, bad: Sequence[Bad]) -> str:
    """Put what cannot be used into lines, at most `LISTED` of them."""
    lines = [f"{len(bad)} pictures of {path} that cannot be used:"]
    lines += [f"  {one.name}: {one.reason}" for one in bad[:LISTED]]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED} more")
    return "\n".join(lines)


def _walk(root: Path) -> tuple[list[Candidate], list[Bad], str]:
    """Find the images and their captions, in the order of their names; and say which other files there are."""
    candidates: list[Candidate] = []
    bad: list[Bad] = []
    others: collections.Counter[str] = collections.Counter()

    def closed(error: OSError) -> None:
        bad.append(Bad(shown(Path(error.filename), root), f"is a folder that cannot be listed: {error.strerror}"))

    for place, folders, files in os.walk(root, onerror=closed):
        here = Path(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        bad += [
            Bad(shown(here / name, root), "is a link to a folder, which is not followed")
            for name in folders
            if (here / name).is_symlink()
        ]
        by_stem: dict[str, list[Path]] = collections.defaultdict(list)
        texts: dict[str, list[Path]] = collections.defaultdict(list)
        for one in (here / name for name in sorted(files) if not name.startswith(".")):
            kind = one.suffix.lower()
            if kind in SUFFIXES:
                by_stem[one.stem].append(one)
            elif kind == CAPTION:
                texts[one.stem].append(one)
            else:
                others[kind or "no suffix"] += 1
        for stem, images in by_stem.items():
            candidates += [Candidate(images[0], tuple(texts[stem]))] if len(images) == 1 else []
            bad += _namesakes(images, root)
    return candidates, bad, ", ".join(f"{many} {_plain(kind)}" for kind, many in others.most_common(KINDS))


def _namesakes(images: Sequence[Path], root: Path) -> Iterator[Bad]:
    """Refuse images of one name, which a caption of that name would be of all at once."""
    for one in images if len(images) > 1 else ():
        others = ", ".join(shown(other, other.parent) for other in images if other != one)
        yield Bad(shown(one, root), f"has the same name as {others}: whose is the caption?")


def _examine(root: Path, candidate: Candidate, min_size: int) -> Found | Bad:
    try:
        data = _bytes(root, candidate.image, MOST_BYTES)
        image = upright(data)
        text = _caption(root, candidate)
    except UnusableError as error:
        return Bad(shown(candidate.image, root), str(error))
    if min(image.size) < min_size:
        reason = f"has {image.width} x {image.height} pixels, fewer than pictures.min_size={min_size}"
        return Bad(shown(candidate.image, root), reason)
    return Found(candidate.image, text, (image.height, image.width), hashlib.sha256(data).hexdigest())


def _bytes(root: Path, path: Path, most: int) -> bytes:
    """Read a plain file inside of the folder, of bounded size."""
    try:
        true = path.resolve()
        plain, inside = true.is_file(), true.is_relative_to(root)
        # A pipe would be waited for, for ever.
        data = true.read_bytes() if plain and inside and true.stat().st_size <= most else None
    except (OSError, RuntimeError) as error:  # links in a circle are a RuntimeError
        raise UnusableError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not inside:
        raise UnusableError("is a link to outside of the folder, which is not followed")
    if not plain:
        raise UnusableError("is no plain file, or a link to nothing")
    if data is None:
        raise UnusableError(f"has more than {most:,} bytes")
    return data


def _caption(root: Path, candidate: Candidate) -> str:
    """Read the caption as one line: white space, line breaks among it, becomes single blanks."""
    if len(candidate.captions) != 1:
        names = ", ".join(shown(one, one.parent) for one in candidate.captions)
        stem = candidate.image.with_suffix(CAPTION)
        raise UnusableError(
            f"has several captions: {names}" if names else f"has no caption: expected {shown(stem, root)}"
        )
    path = candidate.captions[0]
    try:
        text = " ".join(_bytes(root, path, MOST_CAPTION).decode("utf-8-sig").split())
    except UnusableError as error:
        raise UnusableError(f"has a caption, {shown(path, root)}, that {error}") from error
    except UnicodeDecodeError as error:
        raise UnusableError(
            f"has a caption, {shown(path, root)}, whose byte {error.start + 1} is not UTF-8 ({error.reason})"
        ) from error
    control = [sign for sign in text if unicodedata.category(sign) == "Cc"]
    if control:  # it would reach the terminal, and a text of zero bytes is UTF-16
        raise UnusableError(
            f"has a caption, {shown(path, root)}, with the control character U+{ord(control[0]):04X}: expected text in "
            "UTF-8"
        )
    if not text:
        raise UnusableError(f"has an empty caption, {shown(path, root)}")
    return text
