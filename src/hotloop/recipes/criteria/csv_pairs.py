"""Pairs from a CSV of the user's own; a row that does not fit is named by its line before anything is trained."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import DataError
from hotloop.recipes.criteria.pairs import Pair, Split
from hotloop.train.folds import remedy, sample, split_rows, where

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.settings import DataSettings, KfoldSettings


def split(settings: DataSettings, seed: int, kfold: KfoldSettings | None = None) -> Split:
    """Read, check, sample and split the file that ``data.path`` names, once or into folds.

    Raises:
        DataError: the file or one of its rows cannot be used; the message names the first such row's line.
    """
    path, pairs, bad = settings.path or "", list[Pair](), list[str]()
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    for line, row in _rows(Path(path), settings.delimiter, settings.columns.model_dump()):
        fitted = row if isinstance(row, str) else _fit(line, row, seen)
        if isinstance(fitted, Pair):
            pairs.append(fitted)
        else:
            bad.append(f"{path}, line {line}: {fitted}")
    if bad and settings.on_bad_rows == "error":
        raise DataError(f"{bad[0]} ({len(bad)} such rows). Mend them, or leave them out with data.on_bad_rows=skip")
    if not pairs:
        raise DataError(f"{path} holds no rows to train on")
    pairs = sample(pairs, settings.sample_size, seed)
    groups, labels = [pair.group for pair in pairs], [pair.label for pair in pairs]
    train, held_out = split_rows(groups, labels, fraction=settings.validation_fraction, seed=seed, kfold=kfold)
    notes = (f"left out {len(bad)} rows, the first: {bad[0]}",) if bad else ()
    found = Split(tuple(pairs[i] for i in train), tuple(pairs[i] for i in held_out), notes)
    return found.checked(remedy(kfold), where(kfold))


def _rows(path: Path, delimiter: str, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield each row's first line and its values by our names of the columns, or what is wrong with its shape."""
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            missing = [f"data.columns.{ours}={name}" for ours, name in columns.items() if header.count(name) != 1]
            if missing:
                raise DataError(
                    f"{path} has no single column for {', '.join(missing)}; its header reads {', '.join(header)}. Map "
                    "the names by these settings, or set data.delimiter"
                )
            places = {ours: header.index(name) for ours, name in columns.items()}
            line = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    yield line, f"{len(values)} values, where the header names {len(header)} columns"
                elif values:  # an empty line is no row
                    yield line, {ours: values[place].strip() for ours, place in places.items()}
                line = reader.line_num + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}, line {line} or behind it: not readable as CSV in UTF-8 with data.delimiter={delimiter!r}: {error}"
        ) from error
    except OSError as error:
        raise DataError(f"data.path={path} cannot be read: {error.strerror or error}") from error


def _fit(line: int, row: Mapping[str, str], seen: dict[tuple[str, str], tuple[int, int]]) -> Pair | str:
    """Return a row's pair, or what is wrong with it.

    A repeated pair would count twice, and in two groups would be trained on and judged by.
    """
    empty = [ours for ours, value in row.items() if not value]
    if empty:
        return f"{', '.join(empty)} is empty"
    if row["label"] not in ("0", "1"):
        return f"label is {row['label']!r}: expected 0 or 1"
    pair = Pair(row["text"], row["criterion"], int(row["label"]), row["group"])
    first, label = seen.setdefault((pair.text, pair.criterion), (line, pair.label))
    if first == line:
        return pair
    return f"repeats line {first}" if label == pair.label else f"contradicts line {first}, which says {label}"
