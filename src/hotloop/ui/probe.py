"""What this machine can run, asked of a process of its own: the server itself loads no torch.

``python -m hotloop.ui.probe`` prints it as JSON.
"""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

from hotloop import host

_SECONDS = 120


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
        done = subprocess.run(  # noqa: S603 - our own module, without a shell
            host.python("-m", "hotloop.ui.probe"),
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
        return {**empty, **json.loads(done.stdout.splitlines()[-1])}
    except subprocess.TimeoutExpired:
        return {**empty, "error": f"This machine did not say within {_SECONDS} s what it can run."}
    except (ValueError, IndexError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
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


if __name__ == "__main__":
    print(json.dumps(look()))  # noqa: T201 - its answer
