"""Pages of runs: the list, and one run as it goes."""

from __future__ import annotations

import importlib.util
import re
import shlex
import zlib
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from hotloop.report import page, runs
from hotloop.report.text import text
from hotloop.ui import places, processes
from hotloop.ui.run_acts import FORMATS, STUDY, going_on
from hotloop.ui.training_pages import BEST

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from hotloop.ui.site import Site
    from hotloop.ui.watching import Shown

ROWS = 50
"""Runs on a page of the list."""
_PARTS: dict[str, dict[str, str]] = {
    runs.RUN: {one: f"{one}.html.j2" for one in ("summary", "charts", "details")},
    runs.FOLDS: {"summary": "folds_body.html.j2"},
    runs.SEARCH: {"summary": "study_best.html.j2", "details": "study_tables.html.j2"},
}
"""The parts of a run's page that its view fills, by the kind of run: each is replaced alone."""
_TONES = {"finished": "good", "running": "note", "starting": "note", "stopping": "warn", "open": "note"}
_TONES |= {"on cluster": "note", "interrupted": "warn", "killed": "warn", "pruned": "note"}
_SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'none'"
)
"""The policy of a report, which has a script of its own: it acts as another site, without our cookie."""
_PICTURE = "default-src 'none'; frame-ancestors 'none'; sandbox"
"""The policy of a picture that is opened by itself."""


class RunPages:
    """Answers requests about runs."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def runs(self, request: Request) -> Response:
        """Show the list of runs."""
        return self.site.show(request, "runs.html.j2", **self._listed(request))

    def table(self, request: Request) -> Response:
        """Show the table of the list alone, as it is now."""
        return self.site.show(request, "runs_table.html.j2", **self._listed(request))

    def _listed(self, request: Request) -> dict[str, Any]:
        wanted = request.query_params.get("find", "").strip().lower()
        found = [one for one in self.site.places.all() if wanted in one.name.lower()]
        pages = max(1, -(-len(found) // ROWS))
        asked = re.fullmatch("[1-9][0-9]{0,4}", request.query_params.get("page", ""))
        number = min(pages, int(asked[0]) if asked else 1)
        part = found[(number - 1) * ROWS : number * ROWS]
        rows = [(one.name, self.site.watching.row(one.path)) for one in part]
        return {"rows": rows, "total": len(found), "page": number, "pages": pages, "find": wanted, "tones": _TONES}

    def list_news(self, request: Request) -> Response:
        """Stream that something in the list has changed."""
        del request
        return self.site.news(lambda: [(one.name, one.changed) for one in self.site.places.all()])

    def run(self, request: Request) -> Response:
        """Show one run, cross-validation or search."""
        return self._whole(request, "run.html.j2")

    def now(self, request: Request) -> Response:
        """Show all parts of a run's page as they are now: the head, and the others beside it."""
        return self._whole(request, "run_parts.html.j2")

    def frames(self, request: Request) -> Response:
        """Show the frames of a run's charts alone."""
        _, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        template = _PARTS.get(shown.row.kind, {}).get("charts") if shown.view else None
        return self.site.show(request, template, view=shown.view) if template else HTMLResponse("")

    def _whole(self, request: Request, template: str) -> Response:
        name, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        members, left_out = self.site.watching.members(path)
        log, row = places.tail(path / places.LOG), shown.row
        is_search = row.kind == runs.SEARCH
        return self.site.show(
            request, template, name=name, state=self._state(path), parts=_PARTS.get(row.kind, {}) if shown.view else {},
            members=[(self.site.places.name(one), each) for one, each in members], left_out=left_out, tones=_TONES,
            shown=shown, row=row, view=shown.view, tone=_TONES.get(shown.status, "bad"), log=_plain(log),
            samples=places.samples(path)[:12], checkpoints=_checkpoints(path), formats=FORMATS, folder=str(path),
            plots=is_search and _has_plots(path), has_best=is_search and (path / BEST).is_file(),
            again=shlex.join(["hotloop", *going_on(path, row.kind)]), goes_on=_goes_on(path, shown),
            started_as=processes.arguments_of(path),
        )  # fmt: skip

    def _state(self, path: Path) -> str:
        """Return what is another where a run's page has news: of a search also where one of its trials has."""
        members, _ = self.site.watching.members(path)
        told = [(one.name, shown.serial) for one, shown in members]
        return f"{self.site.watching.run(path).serial}-{zlib.crc32(repr(told).encode('utf-8', 'replace')):x}"

    def run_news(self, request: Request) -> Response:
        """Stream that a run has changed."""
        _, path = self.site.run_named(request.query_params)
        return self.site.news(lambda: self._state(path), request.query_params.get("seen"))

    def charts(self, request: Request) -> Response:
        """Return the charts of a run as JSON, thinned to what a screen can show."""
        _, path = self.site.run_named(request.query_params)
        return JSONResponse([one.to_json() for one in getattr(self.site.watching.run(path).view, "charts", ())])

    def sample(self, request: Request) -> Response:
        """Return a picture among a run's samples."""
        _, path = self.site.run_named(request.query_params)
        content, kind = places.picture(path, request.query_params.get("name", ""))
        return Response(content, media_type=kind, headers={"content-security-policy": _PICTURE})

    def report(self, request: Request) -> Response:
        """Return the run's report as `hotloop report` writes it, made now: a file in the folder may be anything."""
        _, path = self.site.run_named(request.query_params)
        view = self.site.watching.run(path).view
        if view is None:
            raise LookupError(path)
        html = page.render(view).encode("utf-8", "replace")
        return HTMLResponse(html, headers={"content-security-policy": _SANDBOX})

    def plots(self, request: Request) -> Response:
        """Return Optuna's plots of a search, made now by a process of its own."""
        name, path = self.site.run_named(request.query_params)
        if not _has_plots(path):
            raise LookupError(name)
        _, out, err = processes.ask([str(path)], module="hotloop.ui.plots")
        if not out:
            return self.site.said(request, f"Optuna made no plot: {err[-2000:]}")
        return HTMLResponse(out, headers={"content-security-policy": _SANDBOX})

    def settings(self, request: Request) -> Response:
        """Return the run's settings as it wrote them, to be kept as a file."""
        _, path = self.site.run_named(request.query_params)
        content = places.tail(path / runs.SETTINGS, 2**20)
        return PlainTextResponse(content, headers={"content-disposition": 'attachment; filename="settings.yaml"'})


def _has_plots(path: Path) -> bool:
    """Return whether a search has its study in its own folder, and Optuna's plots can be made."""
    file = path / "study.db"
    there = file.is_file() and not file.is_symlink()
    return there and all(importlib.util.find_spec(name) for name in ("optuna", "plotly"))


def _goes_on(path: Path, shown: Shown) -> bool:
    """Return whether there is something left that a press of Resume would do."""
    if shown.row.kind == runs.SEARCH:
        return not shown.runs_now and shown.status == "open" and (path / STUDY).is_file()
    return not shown.runs_now and shown.status in ("interrupted", "killed", "failed")


def _checkpoints(path: Path) -> list[tuple[str, int, float]]:
    try:
        files = sorted((path / "checkpoints").glob("*.pt"))
        known = [(one.name, one.lstat()) for one in files if not one.is_symlink()]
        return [(name, one.st_size, one.st_mtime) for name, one in known]
    except OSError:
        return []


def _plain(log: str) -> str:
    """Return the end of a log without what a terminal would act on; of a line that was overwritten, its last text."""
    return "\n".join(text(one.rsplit("\r", 1)[-1]) for one in log.replace("\r\n", "\n").split("\n"))
