"""The page of the machine: what `hotloop doctor` finds, and what is kept of compiles."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.ui import processes
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site

_TONES = {"problem": "bad", "warning": "warn", "note": "note", "ok": "good"}


class MachinePages:
    """Answers requests about the machine. Its questions are asked of commands of hotloop, as a terminal would."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._found: dict[str, Any] | None = None

    def machine(self, request: Request) -> Response:
        """Show the frame of the page, which asks for the rest: it takes seconds."""
        return self.site.show(request, "machine.html.j2")

    def findings(self, request: Request) -> Response:
        """Show what was found; with ``anew``, look again."""
        with self._lock:
            if self._found is None or form_of(request).get("anew"):
                self._found = _look()
            return self.site.show(request, "findings.html.j2", tones=_TONES, **self._found)


def _look() -> dict[str, Any]:
    """Ask `hotloop doctor` and `hotloop cache`; what went wrong is said in their places."""
    doctor, wrong = _asked(["doctor", "--json", "--quick"])
    cache, no_cache = _asked(["cache", "--json"])
    facts = doctor.get("machine", {})
    names = ("hotloop", "python", "system", "architecture", "torch", "cuda", "triton")
    return {
        "found": doctor.get("findings", []), "wrong": wrong, "cache": cache, "no_cache": no_cache,
        "versions": {name: value for name in names if isinstance(value := facts.get(name), str)},
    }  # fmt: skip


def _asked(arguments: list[str]) -> tuple[dict[str, Any], str]:
    try:
        code, out, err = processes.ask(arguments)
        return json.loads(out), ""
    except ConfigError as error:
        return {}, str(error)
    except ValueError:
        last = err.strip().splitlines()[-1:]
        return {}, f"hotloop {' '.join(arguments)} ended with exit code {code}: {''.join(last)}"
