"""The part of the list of runs that shows what waits, and how an entry is taken out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import RedirectResponse

from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site


class QueuePages:
    """Answers requests about the queue."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def part(self, request: Request) -> Response:
        """Show what waits, as it is now."""
        queue = self.site.queue
        return self.site.show(request, "queue.html.j2", queue=queue.entries(), queue_problem=queue.problem)

    def remove(self, request: Request) -> Response:
        """Take a run out of the queue."""
        self.site.queue.remove(form_of(request).get("entry", ""))
        return RedirectResponse("/runs", 303)
