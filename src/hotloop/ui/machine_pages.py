"""The page of the machine: what `hotloop doctor` finds, what is kept of compiles, memory and load."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

from hotloop import host
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

    def machine(self, request: Request) -> Response:
        """Show the frame of the page, which asks for the rest: some answers take seconds."""
        return self.site.show(request, "machine.html.j2", **self._now())

    def now(self, request: Request) -> Response:
        """Show memory, load and GPUs alone, as they are now."""
        return self.site.show(request, "machine_now.html.j2", **self._now())

    def _now(self) -> dict[str, Any]:
        total, free = host.memory()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        return {"total": total, "free": free, "load": load, "cpus": os.cpu_count(), "gpus": self.site.gpus.look()}

    def findings(self, request: Request) -> Response:
        """Show what was found; with ``anew``, look again."""
        with self._lock:
            found = self.site.machine
            if found is None or form_of(request).get("anew"):
                found = self.site.machine = _look()
        return self.site.show(request, "findings.html.j2", tones=_TONES, **found)


def _look() -> dict[str, Any]:
    """Ask `hotloop doctor` and `hotloop cache`; what went wrong is said in their places."""
    doctor, wrong = _asked(["doctor", "--json", "--quick"])
    cache, no_cache = _asked(["cache", "--json"])
    facts = doctor.get("machine", {})
    versions = {name: facts.get(name) for name in ("hotloop", "python", "system", "architecture")}
    torch = facts.get("torch") or {}
    versions |= {"torch": torch.get("version"), "CUDA": torch.get("cuda"), "Triton": torch.get("triton")}
    versions |= {one.get("name"): one.get("version") for one in facts.get("packages", ()) if one.get("version")}
    return {
        "found": doctor.get("findings", []), "wrong": wrong, "cache": cache, "no_cache": no_cache,
        "versions": {name: value for name, value in versions.items() if isinstance(value, str) and value},
    }  # fmt: skip


def _asked(arguments: list[str]) -> tuple[dict[str, Any], str]:
    try:
        code, out, err = processes.ask(arguments)
        found = json.loads(out)
    except ConfigError as error:
        return {}, str(error)
    except ValueError:
        last = err.strip().splitlines()[-1:]
        return {}, f"hotloop {' '.join(arguments)} ended with exit code {code}: {''.join(last)}"
    return found, ""
