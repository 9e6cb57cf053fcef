"""The settings of a user's program, as its own process describes them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from hotloop.errors import ConfigError
from hotloop.ui import processes


def program_schema(name: str) -> dict[str, Any]:
    """Return the JSON Schema of a program's settings; its file is run by a process of its own.

    Raises:
        ConfigError: it cannot be read, with what it raised.
    """
    place = Path(name.rpartition(":")[0])
    return _program_schema(name, place.stat().st_mtime_ns if place.is_file() else 0)


@functools.lru_cache(maxsize=32)
def _program_schema(name: str, changed: int) -> dict[str, Any]:
    del changed  # a file that was changed is read again
    code, out, err = processes.ask(["settings", "--schema", name], 120)
    if code:
        raise ConfigError(f"{name} cannot be read: {err.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(out)
    return found
