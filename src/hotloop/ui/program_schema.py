"""The settings of a user's program, as its own process describes them."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

from hotloop.errors import ConfigError
from hotloop.ui import processes

_KEPT = 32
_known: OrderedDict[tuple[str, int], dict[str, Any]] = OrderedDict()
"""Schemas by the program's name and the time of its file: one that was changed is read again."""


class UnreadError(ConfigError):
    """A program's settings are not known, and its file may not run to tell them; the message is its name."""


def program_schema(name: str, *, may_run: bool) -> dict[str, Any]:
    """Return the JSON Schema of a program's settings.

    Args:
        name: of the program.
        may_run: whether its file may run, in a process of its own, where the schema is not known.

    Raises:
        UnreadError: it is not known, and may not run.
        ConfigError: it cannot be read, with what it raised.
    """
    place = Path(name.rpartition(":")[0])
    key = (name, place.stat().st_mtime_ns if place.is_file() else 0)
    found = _known.get(key)
    if found is None:
        if not may_run:
            raise UnreadError(name)
        code, out, err = processes.ask(["settings", "--schema", name], 120)
        if code:
            raise ConfigError(f"{name} cannot be read: {err.strip()[-2000:]}")
        found = _known[key] = json.loads(out)
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    return found
