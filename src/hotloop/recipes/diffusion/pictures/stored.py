"""Tensors of many rows in files, made once and found again, in whole parts only.

A store has a folder of its own for each key, so that runs with other data or other encoders never read it. A part is
written beside its place and moved there, so a run that is killed leaves whole parts, which the next one reuses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotloop.files import whole
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

SCHEMA = "1"
PART = 256
"""Rows of a part: what a killed run may lose, and what a file holds (8 MB to 40 MB of latents)."""
KEY = "key.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Where and how to keep what encoders give.

    Args:
        folder: of all caches; it may be shared by runs, at the same time too.
        key: what the values depend on besides the data, by name, such as ``{"vae": weights_fingerprint(vae)}``.
        dtype: in which numbers with a fraction are kept.
        batch_size: rows in a forward pass of the encoder, at most `PART`.
        progress: is told how many rows are done, and of how many.
        say: is told in words what is read and encoded.
    """

    folder: Path
    key: Mapping[str, str]
    dtype: torch.dtype
    batch_size: int
    progress: Callable[[int, int], None] | None = None
    say: Callable[[str], None] | None = None


class Stored:
    """Values of rows, read from files when they are asked for: the files are mapped, and not held in memory.

    Args:
        parts: by name, the values of the rows of each part.
        rows: the row numbers of each part; every row is in one of them.
    """

    def __init__(self, parts: Sequence[Mapping[str, Tensor]], rows: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        many = sum(map(len, rows))
        self._part, self._place = torch.empty(many, dtype=torch.int64), torch.empty(many, dtype=torch.int64)
        for index, mine in enumerate(rows):
            self._part[mine], self._place[mine] = index, torch.arange(len(mine))

    def __len__(self) -> int:
        return len(self._part)

    def take(self, rows: Tensor) -> dict[str, Tensor]:
        """Return these rows, each tensor of shape (rows, ...); rows of one call have one shape.

        Args:
            rows: row numbers, int64 of shape (rows,); at least one.

        Raises:
            ValueError: rows of several shapes.
        """
        part, place = self._part[rows], self._place[rows]
        first = self._parts[int(part[0])]
        taken = {name: one.new_empty((len(rows), *one.shape[1:])) for name, one in first.items()}
        for index in sorted(set(part.tolist())):
            mine = part == index
            for name, one in self._parts[index].items():
                if one.shape[1:] != taken[name].shape[1:]:
                    raise ValueError(
                        f"{name}: rows of shapes {tuple(taken[name].shape[1:])} and {tuple(one.shape[1:])}"
                    )
                taken[name][mine] = one[place[mine]]
        return taken


class Store:
    """One kind of values with one key, in a folder of its own.

    Args:
        cache: where.
        kind: names the values in the folder and in messages: ``latents``.
        key: all that the values depend on, by name.
    """

    def __init__(self, cache: Cache, kind: str, key: Mapping[str, str]) -> None:
        self.cache, self.kind = cache, kind
        self.key = {"schema": SCHEMA, "dtype": str(cache.dtype), **key}
        self.digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.folder = cache.folder / f"{kind}-{self.digest[:24]}"

    def fill(self, rows: Sequence[Tensor], make: Callable[[Tensor], dict[str, Tensor]]) -> Stored:
        """Read the parts that are there, make those that are not, and give all.

        Args:
            rows: the row numbers of each part.
            make: gives the values of a part's rows by name, each of shape (rows, ...), on the CPU.

        Raises:
            OSError: a part cannot be written.
        """
        self._begin()
        total, done = sum(map(len, rows)), 0
        there = [self._read(index) for index in range(len(rows))]
        kept = sum(len(mine) for part, mine in zip(there, rows, strict=True) if part is not None)
        self._tell(
            f"{kept:,} of {total:,} read from {self.folder}" + ("" if kept == total else "; the others are made now")
        )
        found = []
        for index, (part, mine) in enumerate(zip(there, rows, strict=True)):
            found.append(part if part is not None else self._write(index, make(mine)))
            done += len(mine)
            if self.cache.progress:
                self.cache.progress(done, total)
        return Stored(found, rows)

    def _tell(self, text: str) -> None:
        if self.cache.say:
            self.cache.say(f"Cache of {self.kind}: {text}")

    def _begin(self) -> None:
        """Say in the folder what its values depend on."""
        if not (self.folder / KEY).is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._replace(self.folder / KEY, lambda path: path.write_text(json.dumps(self.key, indent=1)))

    def _path(self, index: int) -> Path:
        return self.folder / f"part-{index:05}.safetensors"

    def _read(self, index: int) -> dict[str, Tensor] | None:
        """Return a part; None where it is not there or, with a word, where it cannot be read."""
        path = self._path(index)
        if not path.is_file():
            return None
        try:
            return self._load(path)
        except Exception as error:  # noqa: BLE001 - safetensors has errors of its own
            self._tell(f"{path.name} cannot be read ({error}) and is made anew")
            return None

    def _write(self, index: int, part: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Write a part, and give it as it is read from its file, so that it is not held in memory."""
        kept = {
            name: (one.to(self.cache.dtype) if one.is_floating_point() else one).contiguous()
            for name, one in part.items()
        }
        save = require("safetensors.torch", "The cache of latents", "diffusion").save_file
        self._replace(self._path(index), lambda path: save(kept, path))
        return self._load(self._path(index))

    def _load(self, path: Path) -> dict[str, Tensor]:
        return dict(require("safetensors.torch", "The cache of latents", "diffusion").load_file(path))

    def _replace(self, path: Path, write: Callable[[Path], Any]) -> None:
        """Write a file so that its place always holds a whole one, also where two runs write it at the same time."""
        try:
            with whole(path, shared=True) as part:
                write(Path(part.name))
        except Exception as error:  # a full disk is an OSError, or an error of safetensors' own
            raise OSError(f"{path} cannot be written: {error}") from error
