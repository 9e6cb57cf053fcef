"""Values of a record as text for people: units, sizes, places in files; nothing that harms a terminal or a page."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Control characters (terminal escapes among them), bidirectional overrides that make text read as what it is not, and
# lone surrogates, which no file can hold.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

_EXACT = 1e15  # whole numbers below are shown as such: beyond, a double does not hold each
_PLAIN = (1e-4, 1e9)  # numbers outside are shown with an exponent
_HOUR = 3600
_DEPTH = 20


def text(value: Any) -> str:
    """Give any JSON value as text that is safe to show; numbers in full, None as a dash."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(int(value)) if value.is_integer() and abs(value) < _EXACT else repr(value)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", shown)


def line(value: Any, limit: int = 300) -> str:
    """Give a value as one line: whitespace collapsed, the end cut with an ellipsis."""
    shown = " ".join(text(value).split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def number(value: Any) -> float | None:
    """Read a finite number; None for everything else, the record's "nan" and "inf" included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def figure(value: float, digits: int = 4) -> str:
    """Give a number with the digits that matter: 0.8912, 1,234, 3.2e-05."""
    if value and not _PLAIN[0] <= abs(value) < _PLAIN[1]:
        return f"{value:.{digits - 2}e}"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    shown = f"{value:,.{places}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def nth(value: float) -> str:
    """Give the number of a step in full: 12, 1,000,000."""
    return f"{value:,.12g}"


def seconds(value: float) -> str:
    """Give a duration: 850 µs, 12.3 ms, 3.21 s, 4 min 05 s, 2 h 03 min."""
    for below, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if abs(value) < below:
            return f"{figure(value * scale, 3)} {unit}"
    if value < _HOUR:
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    whole = round(value / 60)
    return f"{whole // 60:,} h {whole % 60:02d} min"


def size(value: float) -> str:
    """Give a number of bytes in binary units: 1.25 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(abs(value)) // 10))) if value else 0
    return f"{figure(value / 1024**power, 3)} {units[power]}"


def count(many: int, word: str) -> str:
    """Give a count with its noun: 1 step, 1,200 steps."""
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def moment(value: Any) -> str:
    """Give seconds since the epoch as local date and time; empty where it is none."""
    known = number(value)
    if known is None:
        return ""
    try:
        return dt.datetime.fromtimestamp(known, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def words(key: str) -> str:
    """Give a key of the record as a label: ``peak_memory_bytes`` is "Peak memory", ``seconds_saved`` is "Saved"."""
    for suffix in ("_bytes", "_ms"):
        key = key.removesuffix(suffix)
    shown = (
        text("_".join(part for part in key.split("_") if part != "seconds") or key)
        .replace("_", " ")
        .replace(".", ": ")
        .strip()
    )
    return shown[:1].upper() + shown[1:]


def quantity(key: str, value: Any) -> str:
    """Give a measurement in the unit that its name ends in, or in seconds if they are in it; no number as text."""
    known = number(value)
    if known is None:
        return text(value)
    if key.endswith("speed_up"):
        return f"{figure(known, 3)}\N{MULTIPLICATION SIGN}"
    for suffix, shown in (("_bytes", size), ("_per_second", _rate), ("_ms", _milliseconds)):
        if key.endswith(suffix):
            return shown(known)
    return seconds(known) if "seconds" in key.split("_") else figure(known)


def place(entry: Mapping[str, Any]) -> str:
    """Give ``file:line`` of an event or a cause; empty where it is not known."""
    file, at = entry.get("file"), entry.get("line")
    if not file:
        return ""
    return text(file) if at is None else f"{text(file)}:{text(at)}"


def in_package(where: str) -> str:
    """Give a place in an installed package from the package on, and any other as it is."""
    return re.split(r"[/\\](?:site|dist)-packages[/\\]", where)[-1]


def short_place(where: str, parts: int = 2) -> str:
    """Give the end of a long path: its last folders and the file."""
    pieces = re.split(r"[/\\]", where)
    return where if len(pieces) <= parts + 1 else "…/" + "/".join(pieces[-parts:])


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk nested mappings as dotted keys, in their own order; what nests too deep to be settings stays as it is."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name.count(".") < _DEPTH:
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def _rate(value: float) -> str:
    return f"{figure(value, 3)}/s"


def _milliseconds(value: float) -> str:
    return seconds(value / 1000)
