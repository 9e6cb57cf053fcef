"""What all pages share: templates, the runs folder, what is known of it, and who may ask."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from starlette.responses import HTMLResponse, StreamingResponse

from hotloop.report import page, text
from hotloop.ui.places import Places
from hotloop.ui.probe import Probe
from hotloop.ui.security import FORM
from hotloop.ui.watching import Watching
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from starlette.requests import Request

    from hotloop.ui.security import Access

LOOK_SECONDS = 3.0
"""How often a run is looked at whose page is open."""
ASSETS = Path(__file__).with_name("assets")
STATIC = {
    "htmx.js": "htmx.min.js", "sse.js": "sse.min.js", "app.js": "app.js", "busy.js": "busy.js", "key.js": "key.js",
    "app.css": "app.css",
    "uplot.js": "uplot.min.js", "charts.js": "page.js", "uplot.css": "uplot.min.css", "report.css": "page.css",
}  # fmt: skip
"""The scripts and styles that are served, by their names there: of this package or, where it has none, the report's."""


class Site:
    """One server's pages.

    Args:
        root: the runs folder.
        access: who may ask.
        probe: what this machine can run.
    """

    def __init__(self, root: Path, access: Access, probe: Probe | None = None) -> None:
        self.places, self.access, self.watching, self.probe = Places(root), access, Watching(), probe or Probe()
        self.machine: dict[str, Any] | None = None
        """What was found out of the machine; None where it is to be looked at anew."""
        self.stopping = False

    def show(self, request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return a page, or a part of one."""
        common = {"path": request.url.path, "root": str(self.places.root), "text": text}
        html = _environment().get_template(template).render(version=__version__, **common, **values)
        return HTMLResponse(html.encode("utf-8", "replace"), status)

    def said(  # noqa: PLR0913 - what is said, and the way on
        self, request: Request, words: str, status: int = 409, *, title: str = "Not done", tone: str = "bad",
        log: str = "", back: str = "/runs", label: str = "All runs", act: Mapping[str, Any] | None = None,
    ) -> HTMLResponse:  # fmt: skip
        """Return a page that says one thing, with a way back and perhaps an act that was to be confirmed."""
        return self.show(
            request, "said.html.j2", status, words=words, title=title, tone=tone, log=log, back=back, label=label,
            act=act,
        )  # fmt: skip

    def run_named(self, values: Mapping[str, str]) -> tuple[str, Path]:
        """Return the name and the folder of the run that a request is about.

        Raises:
            LookupError: there is no such run.
        """
        name = values.get("run", "")
        return name, self.places.find(name)

    def news(self, look: Callable[[], object], seen: object = None) -> StreamingResponse:
        """Return a stream that says ``changed`` where a look differs from the one before.

        Args:
            look: what is compared.
            seen: the look that the viewer's page was made of, which may be older than the stream.
        """

        async def stream() -> AsyncIterator[bytes]:
            known = seen
            yield b"retry: 2000\n\n"
            while not self.stopping:
                now = await asyncio.to_thread(look)
                yield b"event: changed\ndata: 1\n\n" if now != known else b": still here\n\n"
                known = now
                await asyncio.sleep(LOOK_SECONDS)

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def form_of(request: Request) -> dict[str, str]:
    """Return the checked form of a request."""
    form: dict[str, str] = request.scope[FORM]
    return form


def asset(name: str) -> tuple[str, str]:
    """Return a script or a style, and its type.

    Raises:
        LookupError: there is none of this name.
    """
    file = STATIC[name]
    own = ASSETS / file
    kind = "text/css" if name.endswith(".css") else "text/javascript"
    return own.read_text(encoding="utf-8") if own.is_file() else page.asset(file), kind


@functools.cache
def _environment() -> jinja2.Environment:
    own = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
    shared = page.environment()
    found = shared.overlay(loader=jinja2.ChoiceLoader([own, *([shared.loader] if shared.loader else [])]))
    found.filters["short"] = lambda value: text.line(value, 200)
    found.filters["prose"] = _prose
    return found


def _prose(words: str) -> Markup:
    """Return a help text with its `names` set as code; all else is escaped."""
    parts = words.split("`")
    return Markup().join(Markup("<code>{}</code>").format(one) if place % 2 else one for place, one in enumerate(parts))
