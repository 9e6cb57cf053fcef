"""The texts: Python's documentation and a sample of its standard library's source, cut into windows by document."""

from __future__ import annotations

import hashlib
import random
import sysconfig
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from hotloop.errors import DataError
from hotloop.train.folds import split_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from hotloop.train.settings import Settings

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "__pycache__", "encodings"}
"""Folders of the standard library that are none, or tables rather than source."""


class Document(NamedTuple):
    """A text by its name."""

    name: str
    text: str


class Sides(NamedTuple):
    """Documents to learn from and documents to judge by; none is on both sides."""

    train: tuple[Document, ...]
    validation: tuple[Document, ...]

    def fingerprint(self) -> str:
        """Give a text that other documents, or the same ones otherwise split, would not have."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def describe(self) -> str:
        """Say how much text there is on each side."""
        return ", ".join(
            f"{name} {sum(len(one.text.encode()) for one in side):,} bytes in {len(side)} documents"
            for name, side in zip(self._fields, self, strict=True)
        )


def load(settings: Settings) -> Sides:
    """Read the documents, and split them.

    Raises:
        DataError: the standard library has no source here, or too few documents.
    """
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, for this recipe alone

    seed, data = settings.run.seed, settings.data
    sources = sorted(_sources(Path(sysconfig.get_paths()["stdlib"])))
    if not sources:
        raise DataError(f"the standard library has no source in {sysconfig.get_paths()['stdlib']}: install it")
    many = settings.focus.files
    sample = random.Random(seed).sample(sources, min(many, len(sources)))  # noqa: S311 - which files, no secret
    found = []
    for name, path in sample:
        with tokenize.open(path) as file:  # in the encoding that the file names
            found.append(Document(name, file.read()))
    found += [Document(f"help({name!r})", text) for name, text in sorted(topics.items())]
    names, kinds = [one.name for one in found], [one.name.startswith("help(") for one in found]
    both = split_rows(names, kinds, fraction=data.validation_fraction, seed=seed, kfold=settings.kfold)
    first, second = (tuple(found[row] for row in side) for side in both)
    return Sides(first, second)


def _sources(root: Path) -> Iterator[tuple[str, Path]]:
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if not _LEFT_OUT.intersection(name.parts):
            yield name.as_posix(), path


def windows(side: tuple[Document, ...], encode: Callable[[str], Tensor], length: int, stride: int) -> Tensor:
    """Cut documents into windows of so many tokens; what is shorter is left out.

    Args:
        side: the documents.
        encode: gives a text's tokens, int64 of shape (tokens,).
        length: tokens of a window.
        stride: tokens between the beginnings of two windows.

    Returns:
        int64 of shape (windows, length).

    Raises:
        DataError: no document is long enough.
    """
    cut = [ids.unfold(0, length, stride) for one in side if len(ids := encode(one.text)) >= length]
    if not cut:
        raise DataError(
            f"no document has {length} tokens, which focus.blocks asks for: use smaller texts (focus.blocks), or more "
            "files (focus.files)"
        )
    return torch.cat(cut)
