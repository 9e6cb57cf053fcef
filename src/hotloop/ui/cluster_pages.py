"""The clusters that runs can be started on: shown, added and removed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.remote import clusters
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site


class ClusterPages:
    """Answers requests about clusters."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def show(self, request: Request) -> Response:
        """Show the clusters, and the form to add one."""
        return self._panel(request)

    def add(self, request: Request) -> Response:
        """Add a cluster, and say so where it does not answer: it may be off now."""
        added = form_of(request).get("added", "").strip()
        try:
            clusters.add(added)
        except ConfigError as error:
            return self._panel(request, added, str(error))
        problem = clusters.problem(clusters.normal(added))
        return self._panel(request, off=problem and f"{clusters.normal(added)} is added, but {problem}")

    def remove(self, request: Request) -> Response:
        """Remove a cluster; its runs stay known."""
        try:
            clusters.remove(form_of(request).get("address", ""))
        except ConfigError as error:
            return self._panel(request, why=str(error))
        return self._panel(request)

    def _panel(self, request: Request, added: str = "", why: str = "", off: str = "") -> Response:
        try:
            found = self.site.elsewhere.addresses()
        except ConfigError as error:
            found, why = [], why or str(error)
        return self.site.show(
            request, "clusters.html.j2", clusters=found, added=added, why=why, off=off, folder=str(Path.cwd())
        )  # fmt: skip
