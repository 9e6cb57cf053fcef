"""Pages of runs: the list, one run as it goes, several side by side."""

from __future__ import annotations

import dataclasses
import shlex
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from hotloop.report import page, runs
from hotloop.report.text import text
from hotloop.ui import compiles, places, processes, usage
from hotloop.ui.plot_pages import installed
from hotloop.ui.run_acts import FORMATS, STUDY, going_on
from hotloop.ui.training_pages import BEST
from hotloop.ui.watching import LOOK_SECONDS, REQUEST_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from hotloop.ui.site import Site
    from hotloop.ui.watching import Shown

ROWS = 50
"""Runs on a page of the list."""
LOOKED_AT = 30
"""Runs among which one is looked for that made the same graphs."""
GONE_SECONDS = 30.0
"""How often it is looked whether a run that was deleted is there again."""
_PARTS: dict[str, dict[str, str]] = {
    runs.RUN: {one: f"{one}.html.j2" for one in ("summary", "charts", "details")},
    runs.FOLDS: {"summary": "folds_body.html.j2"},
    runs.SEARCH: {"summary": "study_best.html.j2", "charts": "study_charts.html.j2", "details": "study_tables.html.j2"},
}
"""The parts of a run's page that its view fills, by the kind of run: each is replaced alone."""
TONES = {"finished": "good", "running": "note", "starting": "note", "stopping": "warn", "open": "note"}
TONES |= {"on cluster": "note", "interrupted": "warn", "killed": "warn", "pruned": "note", "queued": "note"}
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
        self._lock = threading.Lock()
        self._earlier: dict[Any, compiles.Compiles | None] = {}

    def runs(self, request: Request) -> Response:
        """Show the list of runs."""
        waits: dict[str, Any] = {"queue": self.site.queue.entries(), "queue_problem": self.site.queue.problem}
        return self.site.show(request, "runs.html.j2", **waits, **self._listed(request))

    def table(self, request: Request) -> Response:
        """Show the table of the list alone, as it is now."""
        return self.site.show(request, "runs_table.html.j2", **self._listed(request))

    def _listed(self, request: Request) -> dict[str, Any]:
        wanted = request.query_params.get("find", "").strip().lower()
        found = [one for one in self.site.places.all() if wanted in one.name.lower()]
        pages = max(1, -(-len(found) // ROWS))
        asked = request.query_params.get("page", "1")
        number = min(pages, max(1, int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 6 else 1))  # noqa: PLR2004 - digits
        part = found[(number - 1) * ROWS : number * ROWS]
        rows = [(one.name, self.site.watching.row(one.path), self.site.elsewhere.shown(one.path)[1]) for one in part]
        return {"rows": rows, "total": len(found), "page": number, "pages": pages, "find": wanted, "tones": TONES}

    def list_news(self, request: Request) -> Response:
        """Stream that something in the list has changed."""
        del request

        def pause() -> float:
            return self.site.watching.list_pause

        def look() -> tuple[object, ...]:
            runs_ = [(one.name, one.changed) for one in self.site.places.all()]
            return runs_, self.site.watching.working(), self.site.queue.entries(), self.site.queue.problem

        return self.site.news(look, pause)

    def run(self, request: Request) -> Response:
        """Show one run, cross-validation or search."""
        name, path = self.site.run_named(request.query_params)
        state = self._state(path)
        shown = self.site.watching.run(path)
        parts = _PARTS.get(shown.row.kind, {}) if shown.view else {}
        return self.site.show(
            request,
            "run.html.j2",
            name=name,
            parts=parts,
            state=state,
            **self._members(path),
            **self._of_run(path, shown),
        )

    def head(self, request: Request) -> Response:
        """Show the part of a run's page that changes as it goes."""
        name, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        return self.site.part(request, shown, "run_head.html.j2", lambda: {"name": name, **self._of_run(path, shown)})

    def now(self, request: Request) -> Response:
        """Show all parts of a run's page at once, as they are now: the head, and the others beside it."""
        name, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        parts = _PARTS.get(shown.row.kind, {}) if shown.view else {}
        return self.site.part(
            request, shown, "run_now.html.j2",
            lambda: {"name": name, "parts": parts, **self._members(path), **self._of_run(path, shown)},
            self._state(path),
        )  # fmt: skip

    def part(self, request: Request) -> Response:
        """Show one part of a run's page as it is now; nothing where the run has no such part, or not yet."""
        name, path = self.site.run_named(request.query_params)
        wanted = request.query_params.get("part", "")
        if wanted == "members":
            return self.site.show(request, "members.html.j2", **self._members(path))
        shown = self.site.watching.run(path)
        parts = _PARTS.get(shown.row.kind, {}) if shown.view else {}
        template = "run_files.html.j2" if wanted == "files" else parts.get(wanted)
        if template is None:
            return HTMLResponse("")
        return self.site.part(request, shown, template, lambda: {"name": name, **self._of_run(path, shown)})

    def usage(self, request: Request) -> Response:
        """Show what a run's process takes now: it changes while no file does, as in a long compile."""
        name, path = self.site.run_named(request.query_params)
        process = processes.find(path)
        here = process if process and process.here else None
        gpus, resident = (self.site.gpus.look(), usage.memory(here.pid)) if here else ([], None)
        return self.site.show(request, "usage.html.j2", name=name, gpus=gpus, resident=resident)

    def _members(self, path: Path) -> dict[str, Any]:
        found, left_out = self.site.watching.members(path)
        members = [(self.site.places.name(one), shown) for one, shown in found]
        return {"members": members, "left_out": left_out, "tones": TONES}

    def _state(self, path: Path) -> str:
        """Return what is another where a run's page has news: of a search also where one of its trials has."""
        members, _ = self.site.watching.members(path)
        told = [(one.name, shown.status, shown.row.best, shown.done) for one, shown in members]
        return f"{self.site.watching.run(path).serial}-{zlib.crc32(repr(told).encode('utf-8', 'replace')):x}"

    def _of_run(self, path: Path, shown: Shown) -> dict[str, Any]:
        log = path / places.LOG
        remote, where = self.site.elsewhere.shown(path)
        command = shlex.join(["hotloop", *going_on(path, shown.row.kind)])
        return {
            "shown": shown, "row": shown.row, "view": shown.view, "tone": TONES.get(shown.status, "bad"),
            "log": _plain(places.tail(log)), "samples": places.samples(path)[:12], "checkpoints": _checkpoints(path),
            "exported": places.exported(path), "formats": FORMATS,
            "plots": shown.row.kind == runs.SEARCH and shown.view is not None and installed(),
            "has_best": shown.row.kind == runs.SEARCH and (path / BEST).is_file(),
            "again": f"hotloop submit fetch {remote.name}" if remote else command, "where": where, "folder": str(path),
            "goes_on": _follows(shown) if remote else _goes_on(path, shown),
            "started_as": processes.arguments_of(path), **self._now(path, shown),
        }  # fmt: skip

    def _now(self, path: Path, shown: Shown) -> dict[str, Any]:
        """Return what a run's process takes now, and how far its compiles are."""
        if shown.process is None or not shown.process.here or shown.compiles is None:
            return {"gpus": [], "resident": None, "compiles": None}
        with self._lock:
            key = (path, shown.process)
            if key not in self._earlier:
                beside = [one.path for one in self.site.places.all() if one.path.parent == path.parent]
                rows = ((one, self.site.watching.row(one).row) for one in beside[:LOOKED_AT] if one != path)
                self._earlier = {key: compiles.earlier(shown.row.settings, rows)} if shown.row.settings else {}
            now = dataclasses.replace(shown.compiles, earlier=self._earlier.get(key))
        return {"gpus": self.site.gpus.look(), "resident": usage.memory(shown.process.pid), "compiles": now}

    def run_news(self, request: Request) -> Response:
        """Stream that a run has changed."""
        _, path = self.site.run_named(request.query_params)
        watching = self.site.watching

        def pause() -> float:
            return min(LOOK_SECONDS, watching.run(path).pause) if path.is_dir() else GONE_SECONDS

        seen = request.query_params.get("seen")
        return self.site.news(lambda: self._state(path), pause, seen)

    def charts(self, request: Request) -> Response:
        """Return the charts of a run as JSON, thinned to what a screen can show."""
        _, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        shown.seconds += REQUEST_SECONDS
        if "charts" not in shown.parts:
            spent, charts = time.thread_time(), shown.view.charts if shown.view else ()
            shown.parts["charts"] = bytes(JSONResponse([chart.to_json() for chart in charts]).body)
            shown.seconds += time.thread_time() - spent
        return Response(shown.parts["charts"], media_type="application/json")

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

    def settings(self, request: Request) -> Response:
        """Return the run's settings as it wrote them, to be kept as a file."""
        _, path = self.site.run_named(request.query_params)
        content = places.tail(path / runs.SETTINGS, 2**20)
        return PlainTextResponse(content, headers={"content-disposition": 'attachment; filename="settings.yaml"'})


def _goes_on(path: Path, shown: Shown) -> bool:
    """Return whether there is something left that a press of Resume would do."""
    if shown.row.kind == runs.SEARCH:
        return not shown.runs_now and shown.status == "open" and (path / STUDY).is_file()
    return not shown.runs_now and shown.status in ("interrupted", "killed", "failed")


def _follows(shown: Shown) -> bool:
    """Return whether there is something left of a cluster's run that a press of Follow would bring."""
    return shown.process is None and shown.status != "finished"


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
