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
        """Add a cluster; nothing is asked of it before a run is started or checked there."""
        added = form_of(request).get("added", "").strip()
        try:
            clusters.add(added)
        except ConfigError as error:
            return self._panel(request, added, str(error))
        return self._panel(request)

    def remove(self, request: Request) -> Response:
        """Remove a cluster; its runs stay known."""
        try:
            clusters.remove(form_of(request).get("address", ""))
        except ConfigError as error:
            return self._panel(request, why=str(error))
        return self._panel(request)

    def _panel(self, request: Request, added: str = "", why: str = "") -> Response:
        try:
            found = self.site.elsewhere.addresses()
        except ConfigError as error:
            found, why = [], why or str(error)
        return self.site.show(
            request, "clusters.html.j2", clusters=found, added=added, why=why, folder=str(Path.cwd())
        )  # fmt: skip
