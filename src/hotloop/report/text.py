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


def text(value: Any) -> str:
    """Return any JSON value as text that is safe to show; numbers in full, None as a dash."""
    if value is None:
        return "\N{EN DASH}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        exact = value.is_integer() and abs(value) < 1e15  # noqa: PLR2004 - above it a double skips integers
        return repr(int(value)) if exact else repr(value)
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", shown)


def line(value: Any, limit: int = 300) -> str:
    """Return a value as one line: whitespace collapsed, the end cut with an ellipsis."""
    shown = " ".join(text(value).split())
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def number(value: Any) -> float | None:
    """Return a finite number as a float; None for everything else, including the record's "nan" and "inf"."""
    if type(value) is float:  # a record has hundreds of thousands of them
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def figure(value: float, digits: int = 4) -> str:
    """Return a number with its leading digits: 0.8912, 1,234, 3.2e-05."""
    if value and not 1e-4 <= abs(value) < 1e9:  # noqa: PLR2004 - others are not readable without an exponent
        return f"{value:.{digits - 2}e}"
    places = max(0, digits - 1 - (math.floor(math.log10(abs(value))) if value else 0))
    shown = f"{value:,.{places}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def nth(value: float) -> str:
    """Return the number of a step in full: 12, 1,000,000."""
    return f"{value:,.12g}"


def seconds(value: float) -> str:
    """Return a duration: 850 µs, 12.3 ms, 3.21 s, 4 min 05 s, 2 h 03 min."""
    if not value:
        return "0 s"
    for below, scale, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if abs(value) < below:
            return f"{figure(value * scale, 3)} {unit}"
    if value < 3600:  # noqa: PLR2004 - an hour
        whole = round(value)
        return f"{whole // 60} min {whole % 60:02d} s"
    whole = round(value / 60)
    return f"{whole // 60:,} h {whole % 60:02d} min"


def size(value: float) -> str:
    """Return a number of bytes in binary units: 1.25 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(abs(value)) // 10))) if value else 0
    return f"{figure(value / 1024**power, 3)} {units[power]}"


def count(many: int, word: str) -> str:
    """Return a count with its noun: 1 step, 1,200 steps."""
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def moment(value: Any) -> str:
    """Return seconds since the epoch as local date and time; empty for any other value."""
    known = number(value)
    if known is None:
        return ""
    try:
        return dt.datetime.fromtimestamp(known, dt.UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return ""


def words(key: str) -> str:
    """Return a key of the record as a label: ``peak_memory_bytes`` is "Peak memory", ``seconds_saved`` is "Saved"."""
    for suffix in ("_bytes", "_ms"):
        key = key.removesuffix(suffix)
    without_seconds = "_".join(part for part in key.split("_") if part != "seconds")
    shown = text(without_seconds or key).replace("_", " ").replace(".", ": ").strip()
    return shown[:1].upper() + shown[1:]


def quantity(key: str, value: Any) -> str:
    """Return a measurement in the unit that its name ends in, or in seconds if its name has them; else as text."""
    known = number(value)
    if known is None:
        return text(value)
    if key.endswith("speed_up"):
        return f"{figure(known, 3)}\N{MULTIPLICATION SIGN}"
    if key.endswith("_bytes"):
        return size(known)
    if key.endswith("_per_second"):
        return f"{figure(known, 3)}/s"
    if key.endswith("_ms"):
        return seconds(known / 1000)
    return seconds(known) if "seconds" in key.split("_") else figure(known)


def place(entry: Mapping[str, Any]) -> str:
    """Return ``file:line`` of an event or a cause; empty if it is unknown."""
    file, at = entry.get("file"), entry.get("line")
    if not file:
        return ""
    return text(file) if at is None else f"{text(file)}:{text(at)}"


def short_place(where: str, parts: int = 2) -> str:
    """Return the end of a long path: its last folders and the file."""
    pieces = re.split(r"[/\\]", where)
    return where if len(pieces) <= parts + 1 else "…/" + "/".join(pieces[-parts:])


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the items of nested mappings with dotted keys, in order; mappings at depth 20 are not opened further."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name.count(".") < 20:  # noqa: PLR2004 - no settings nest so deep
            yield from flat(value, f"{name}.")
        else:
            yield name, value


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a mapping of a record; an empty one for a value of another type."""
    return value if isinstance(value, Mapping) else {}


def listing(value: Any) -> list[Any]:
    """Return a list of a record; an empty one for a value of another type."""
    return value if isinstance(value, list) else []
