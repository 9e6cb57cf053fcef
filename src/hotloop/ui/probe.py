"""Asks processes of their own what this machine can run and which settings a program has: the server loads no torch.

``python -m hotloop.ui.probe`` prints the former as JSON.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from hotloop.errors import ConfigError
from hotloop.ui import processes
from hotloop.ui.fields import shortened

_SECONDS = 120
_LONGEST = 4096
"""Characters in a program's name: no system has longer paths."""


class Probe:
    """Asks once, in the background, and keeps the answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer: dict[str, Any] | None = None

    def begin(self) -> None:
        """Ask now, so that the first page need not wait for long."""
        threading.Thread(target=self.answer, daemon=True).start()

    def answer(self) -> dict[str, Any]:
        """Return ``device``, ``missing`` (by preset, empty where nothing is) and ``components`` (by recipe).

        Where the question fails, ``error`` says how, and nothing is known to be missing.
        """
        with self._lock:
            if self._answer is None:
                self._answer = _ask()
            return self._answer


def _ask() -> dict[str, Any]:
    empty: dict[str, Any] = {"device": "", "error": "", "missing": {}, "components": {}}
    try:
        _, out, err = processes.ask([], _SECONDS, "hotloop.ui.probe")
    except ConfigError as error:
        return {**empty, "error": str(error)}
    try:
        return {**empty, **json.loads(out.splitlines()[-1])}
    except (ValueError, IndexError):
        last = err.strip().splitlines()[-1:]
        return {**empty, "error": f"What this machine can run is not known: {''.join(last) or 'no answer'}"}


def look() -> dict[str, Any]:
    """Look at this machine; loads torch and the recipes."""
    import torch  # noqa: PLC0415 - not in the server

    from hotloop import recipes  # noqa: PLC0415
    from hotloop.compiling.fallback.availability import missing  # noqa: PLC0415
    from hotloop.presets import PRESETS  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    return {
        "device": device,
        "missing": {name: missing(preset, device) for name, preset in PRESETS.items()},
        "components": {name: list(recipes.load(name).COMPONENTS) for name in recipes.NAMES},
    }


class UnreadError(ConfigError):
    """A program's settings are not known, and its file may not run to tell them; the message is its name."""


_known: dict[tuple[str, int], dict[str, Any]] = {}
"""Schemas by the program's name and the time of its file: one that was changed is read again."""


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
    if "\0" in name or len(name) > _LONGEST:
        raise ConfigError(f"program={shortened(name)!r} cannot be read: it is no name of a file or a module")
    try:
        key = (name, place.stat().st_mtime_ns if place.is_file() else 0)
    except OSError as error:  # a name may be of any length
        raise ConfigError(f"program={shortened(name)!r} cannot be read: {error.strerror}") from error
    if key not in _known:
        if not may_run:
            raise UnreadError(name)
        code, out, err = processes.ask(["settings", "--schema", name], _SECONDS)
        if code:
            raise ConfigError(f"{name} cannot be read: {err.strip()[-2000:]}")
        _known[key] = json.loads(out)
    return _known[key]


if __name__ == "__main__":
    print(json.dumps(look()))  # noqa: T201 - its answer
