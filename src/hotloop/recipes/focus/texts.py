"""The texts: Python's documentation and a sample of its standard library's source, several documents by turns."""

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
from hotloop.train.optional import require

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
        """Return a text that other documents, or the same ones otherwise split, would not have."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()

    def describe(self) -> str:
        """Say how much text there is on each side."""
        return ", ".join(
            f"{name} {sum(len(one.text.encode()) for one in side):,} bytes in {len(side)} documents"
            for name, side in zip(self._fields, self, strict=True)
        )


class Tokens:
    """Byte pairs that are frequent in a text, as tokens."""

    def __init__(self, text: str, vocabulary: int) -> None:
        tokenizers = require("tokenizers", "recipe=focus", "demo")
        byte_level = tokenizers.pre_tokenizers.ByteLevel
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False
        )
        self._tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
        self._tokenizer.train_from_iterator([text], trainer)
        self.count: int = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, int64 of shape (tokens,)."""
        return torch.tensor(self._tokenizer.encode(text).ids)


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
        # What was generated as this Python was built is of one machine, its paths among it.
        generated = path.name.startswith("_sysconfigdata")
        if not generated and not _LEFT_OUT.intersection(name.parts):
            yield name.as_posix(), path


class Pieces(NamedTuple):
    """Pieces of documents: tokens, int64 of shape (pieces, length), and the number of each piece's document."""

    tokens: Tensor
    document: Tensor


def cut(side: tuple[Document, ...], encode: Callable[[str], Tensor], length: int, stride: int) -> Pieces:
    """Cut documents into pieces of so many tokens; what is shorter is left out.

    Args:
        side: the documents.
        encode: gives a text's tokens, int64 of shape (tokens,).
        length: tokens of a piece.
        stride: tokens between the beginnings of two pieces.

    Raises:
        DataError: no document is long enough.
    """
    encoded = [(number, encode(one.text)) for number, one in enumerate(side)]
    found = [(number, ids.unfold(0, length, stride)) for number, ids in encoded if len(ids) >= length]
    if not found:
        raise DataError(
            f"no document has {length} tokens, which focus.blocks asks for: use shorter texts (focus.blocks), or more "
            "files (focus.files)"
        )
    many = [torch.full((len(rows),), number) for number, rows in found]
    return Pieces(torch.cat([rows for _, rows in found]), torch.cat(many))


def by_turns(pieces: Pieces, documents: int, ahead: int, generator: torch.Generator) -> Tensor:
    """Make texts that read several documents in turns and come back to one of them.

    A text holds the beginnings of ``documents`` pieces of different documents in an order drawn at random, and ends
    with the last ``ahead`` tokens of one of them, which go on where its beginning ended. Each is come back to once.

    Args:
        pieces: of a length above ``ahead``.
        documents: in a text; with 1 a text is its piece.
        ahead: tokens.
        generator: what is drawn is drawn from it.

    Returns:
        int64 of shape (pieces, documents x (length - ahead) + ahead).

    Raises:
        DataError: there are too few documents.
    """
    rows, length = pieces.tokens.shape
    there = len(set(pieces.document.tolist()))
    if there < documents:
        raise DataError(
            f"focus.documents={documents}: only {there} documents have {length} tokens; use fewer, or more files "
            "(focus.files)"
        )
    chosen = [torch.arange(rows)]
    while len(chosen) < documents:
        other = torch.randint(rows, (rows,), generator=generator)
        while (again := _shared(pieces.document, chosen, other)).any():
            other[again] = torch.randint(rows, (int(again.sum()),), generator=generator)
        chosen.append(other)
    order = torch.rand(rows, documents, generator=generator).argsort(1)
    shuffled = torch.stack(chosen, 1).gather(1, order)
    beginnings = pieces.tokens[shuffled, : length - ahead].flatten(1)
    return torch.cat([beginnings, pieces.tokens[:, length - ahead :]], 1)


def _shared(document: Tensor, chosen: list[Tensor], other: Tensor) -> Tensor:
    """Say in which rows a further piece is of a document that is there already."""
    return torch.stack([document[one] == document[other] for one in chosen]).any(0)
