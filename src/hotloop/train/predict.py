"""``hotloop predict``: the rows of a CSV or JSONL file through the model of a run, and a row of output for each."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hotloop import record
from hotloop.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Row = dict[str, Any]
    Predict = Callable[[list[Row]], Any]

SUFFIXES = (".csv", ".jsonl")
PREDICTION = "prediction"
"""The column of a prediction that has no columns of its own."""


def read(path: Path, delimiter: str = ",") -> list[Row]:
    """Read the rows of a file: text by column of a CSV, JSON objects of a JSONL.

    Raises:
        DataError: it cannot be read, or a line is no row, by its number.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: expected a file that ends with {' or '.join(SUFFIXES)}")
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if path.suffix == ".jsonl":
        # Not by splitlines(): text within a JSON string may hold U+2028 and other ends of a line.
        return [_parsed(path, at, line) for at, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        found = []
        for row in rows:
            if None in row or None in row.values():
                raise DataError(
                    f"{path}, line {rows.line_num}: expected {len(rows.fieldnames or ())} values, as the header"
                )
            found.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: not readable as CSV: {error}") from error
    return found


def _parsed(path: Path, at: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, line {at}: not readable as JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{path}, line {at}: expected a JSON object, found {type(row).__name__}")
    return row


def column(rows: list[Row], name: str) -> list[str]:
    """Return a column of texts.

    Raises:
        DataError: a row does not have it.
    """
    for at, row in enumerate(rows, 1):
        if not isinstance(row.get(name), str):
            raise DataError(f"row {at} has no text {name!r}: it has {', '.join(map(str, row)) or 'nothing'}")
    return [row[name] for row in rows]


def predictions(rows: list[Row], predict: Predict, batch_size: int) -> list[Row]:
    """Return each row with its prediction behind it: under its own names where it is a mapping.

    Raises:
        ConfigError: ``predict`` does not return one prediction for each row.
    """
    found = []
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        with torch.no_grad():
            given = predict([dict(row) for row in batch])
        made = given.tolist() if isinstance(given, torch.Tensor) or hasattr(given, "tolist") else given
        if not isinstance(made, Sequence) or isinstance(made, str) or len(made) != len(batch):
            many = f"{len(made)} of them" if isinstance(made, Sequence) else f"a {type(made).__name__}"
            raise ConfigError(
                f"predict gave {many}: expected a sequence with a prediction for each of {len(batch)} rows"
            )
        for row, one in zip(batch, made, strict=True):
            found.append({**row, **(one if isinstance(one, Mapping) else {PREDICTION: one})})
    return found


def written(rows: list[Row], suffix: str, delimiter: str = ",") -> str:
    """Return rows as the text of a CSV or a JSONL file; what is no text or number in a CSV is JSON there."""
    if suffix == ".jsonl":
        return "".join(f"{record.to_json(row)}\n" for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    plain = [{name: json.loads(record.to_json(value)) for name, value in row.items()} for row in rows]
    writer.writerows(
        {name: value if isinstance(value, str | int | float) else json.dumps(value) for name, value in row.items()}
        for row in plain
    )
    return text.getvalue()
