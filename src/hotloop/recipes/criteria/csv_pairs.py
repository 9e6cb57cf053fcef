"""Pairs from a CSV of the user's own: what does not fit is listed by line number before anything is trained."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import DataError
from hotloop.recipes.criteria.pairs import Pair, Split
from hotloop.train.folds import remedy, sample, split_rows, where
from hotloop.train.schema import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.settings import DataSettings, KfoldSettings

LISTED = 20
"""How many bad rows a message lists before it says how many more there are."""


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """A row that does not fit, by the number of its first line in the file (the header is on line 1)."""

    line: int
    reason: str


def split(settings: DataSettings, seed: int, kfold: KfoldSettings | None = None) -> Split:
    """Read, check, sample and split the file that ``data.path`` names, once or into folds.

    Raises:
        DataError: the file or its rows cannot be used; bad rows are listed by line number.
    """
    assert settings.path is not None
    pairs, bad = read(settings)
    listing = _listing(settings.path, bad)
    if bad and settings.on_bad_rows == "error":
        raise DataError(f"{listing}\nMend these rows, or leave them out with data.on_bad_rows=skip")
    if not pairs:
        raise DataError(f"{settings.path} holds no rows to train on, only {'bad rows' if bad else 'a header'}")
    pairs = sample(pairs, settings.sample_size, seed)
    groups, labels = [pair.group for pair in pairs], [pair.label for pair in pairs]
    train, held_out = split_rows(groups, labels, fraction=settings.validation_fraction, seed=seed, kfold=kfold)
    notes = (f"left out {listing}",) if bad else ()
    return Split(tuple(pairs[i] for i in train), tuple(pairs[i] for i in held_out), notes).checked(
        remedy(kfold), where(kfold)
    )


def read(settings: DataSettings) -> tuple[list[Pair], list[BadRow]]:
    """Read the file's rows: those that fit, and those that do not with the reason.

    Raises:
        DataError: there is no such file, it is not UTF-8 or no CSV, or a column is missing.
    """
    path = Path(settings.path or "")
    if not path.is_file():
        if path.is_dir():
            raise DataError(f"data.path={settings.path}: this is a folder, expected a CSV file")
        near = [one.name for one in path.parent.glob("*.csv")] if path.parent.is_dir() else []
        raise DataError(f"data.path={settings.path}: no such file" + (f"; {nearest(path.name, near)}" if near else ""))
    pairs: list[Pair] = []
    bad: list[BadRow] = []
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    columns = settings.columns.model_dump()
    for line, row in _rows(path, settings.delimiter, columns):
        fitted = row if isinstance(row, str) else _fit(row, columns)
        if isinstance(fitted, Pair):
            fitted = _unrepeated(fitted, line, seen)
        if isinstance(fitted, Pair):
            pairs.append(fitted)
        else:
            bad.append(BadRow(line, fitted))
    return pairs, bad


def _rows(path: Path, delimiter: str, columns: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield each row's first line and its values by the file's column names, or what is wrong with its shape."""
    line = 1
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, columns)
            line = reader.line_num + 1
            for values in reader:
                if values and len(values) != len(header):
                    yield line, f"{len(values)} values, where the header names {len(header)} columns"
                elif values:  # an empty line is no row
                    yield line, dict(zip(header, values, strict=True))
                line = reader.line_num + 1
    except UnicodeDecodeError as error:
        raise DataError(_undecodable(path, error)) from error
    except csv.Error as error:
        raise DataError(
            f"{path}, line {line}: not readable as CSV with data.delimiter={delimiter!r}: {error}"
        ) from error
    except OSError as error:
        raise DataError(f"data.path={path} cannot be read: {error.strerror or error}") from error


def _check_header(path: Path, header: list[str], columns: Mapping[str, str]) -> None:
    if not header:
        raise DataError(f"{path} is empty: expected a header with {', '.join(columns.values())}")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{path}: the header names {', '.join(twice)} more than once")
    missing = [f"{ours}={name}" for ours, name in columns.items() if name not in header]
    if missing:
        settings = ", ".join(f"data.columns.{one}" for one in missing)
        raise DataError(
            f"{path} has no column for {settings}; its header reads {', '.join(header)}. Map the names, such as "
            f"data.columns.{missing[0].partition('=')[0]}={header[0]}, or set data.delimiter"
        )


def _undecodable(path: Path, error: UnicodeDecodeError) -> str:
    """Find the line of the first byte that is no UTF-8; the decoder itself knows only its place in a chunk."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as found:
            return (
                f"{path}, line {number}: byte {found.object[found.start]:#04x} is not UTF-8 ({found.reason}); save the "
                "file as UTF-8"
            )
    return f"{path} is not UTF-8: {error}"


def _fit(row: Mapping[str, str], columns: Mapping[str, str]) -> Pair | str:
    values = {ours: row[name].strip() for ours, name in columns.items()}
    empty = [columns[ours] for ours, value in values.items() if not value]
    if empty:
        return f"{', '.join(empty)} is empty"
    if values["label"] not in ("0", "1"):
        return f"{columns['label']} is {values['label']!r}: expected 0 or 1"
    return Pair(values["text"], values["criterion"], int(values["label"]), values["group"])


def _unrepeated(pair: Pair, line: int, seen: dict[tuple[str, str], tuple[int, int]]) -> Pair | str:
    """A repeated pair would count twice, and in two groups would be trained on and judged by."""
    first = seen.setdefault((pair.text, pair.criterion), (line, pair.label))
    if first[0] == line:
        return pair
    return (
        f"repeats line {first[0]}" if first[1] == pair.label else f"contradicts line {first[0]}, which says {first[1]}"
    )


def _listing(path: str, bad: list[BadRow]) -> str:
    lines = [f"{len(bad)} rows of {path} that do not fit:"]
    lines += [f"  line {row.line}: {row.reason}" for row in bad[:LISTED]]
    if len(bad) > LISTED:
        lines.append(f"  and {len(bad) - LISTED} more")
    return "\n".join(lines)
