"""Optuna's own plots of a search, where optuna and plotly are installed: Plotly's script comes from its package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import FileResponse, JSONResponse, Response

from hotloop import host
from hotloop.errors import ConfigError
from hotloop.report import study
from hotloop.ui.security import POLICY

if TYPE_CHECKING:
    from starlette.requests import Request

    from hotloop.ui.site import Site

_SECONDS = 120
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
"""An empty style element is all that may be inline: Plotly makes one, and puts rules into it by script."""
_HEADERS = {"content-security-policy": POLICY.replace("style-src 'self'", f"style-src 'self' {_EMPTY}")}


def installed() -> bool:
    """Return whether there is what makes and draws Optuna's plots; nothing of it is imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("optuna", "plotly"))


class PlotPages:
    """Answers requests about Optuna's plots."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._lock = threading.Lock()
        self._kept: tuple[object, list[Any]] = (None, [])

    def plots(self, request: Request) -> Response:
        """Show the frame of the page, whose script asks for the figures."""
        name, path = self.site.run_named(request.query_params)
        if not installed() or not study.SCHEMA.is_at(path):
            raise LookupError(name)
        version = importlib.metadata.version("plotly")
        answer = self.site.show(request, "plots.html.j2", name=name, plotly=version)
        answer.headers.update(_HEADERS)
        return answer

    def figures(self, request: Request) -> Response:
        """Return the figures of a search as JSON, made once for each state of it."""
        _, path = self.site.run_named(request.query_params)
        if not installed() or not study.SCHEMA.is_at(path):
            raise LookupError(path)
        there = (path / study.DOCUMENT).stat()
        key = (path, there.st_mtime_ns, there.st_size)
        with self._lock:
            if self._kept[0] != key:
                self._kept = (key, _figures(path))
            return JSONResponse(self._kept[1])

    def script(self, request: Request) -> Response:
        """Return Plotly as its package has it."""
        del request
        found = importlib.util.find_spec("plotly")
        if found is None or found.origin is None:
            raise LookupError("plotly")
        file = Path(found.origin).parent / "package_data" / "plotly.min.js"
        kept = {"cache-control": "private, max-age=604800"}  # its address has its version
        return FileResponse(file, media_type="text/javascript", headers=kept)


def _figures(path: Path) -> list[Any]:
    """Return the figures that a process of its own makes.

    Raises:
        ConfigError: it cannot, with what it said.
    """
    command = host.python("-m", "hotloop.ui.study_plots", str(path))
    try:
        done = subprocess.run(  # noqa: S603 - our own module, without a shell
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=False
        )
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Optuna's plots of {path.name} took longer than {_SECONDS} s, and were ended") from None
    except (ValueError, IndexError):
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ConfigError(f"Optuna's plots of {path.name} cannot be made: {''.join(last) or 'no answer'}") from None
    return found
