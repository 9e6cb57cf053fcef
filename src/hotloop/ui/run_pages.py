"""Pages of runs: the list, one run as it goes, several side by side."""

from __future__ import annotations

import dataclasses
import shlex
import threading
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from hotloop.report import page, runs
from hotloop.report.charts import Chart
from hotloop.report.series import Line
from hotloop.report.text import line, quantity, text
from hotloop.ui import compiles, places, processes, usage
from hotloop.ui.run_acts import STUDY, going_on

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
COMPARED = 8
"""Runs that are compared at most: as many as a chart has colours."""
_PARTS = {one: f"{one}.html.j2" for one in ("charts", "details", "summary")} | {"files": "run_files.html.j2"}
TONES = {"finished": "good", "running": "note", "starting": "note", "stopping": "warn", "open": "note"}
TONES |= {"interrupted": "warn", "killed": "warn", "pruned": "note", "queued": "note"}
_SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
)
"""The policy of a report, which has a script of its own: it acts as another site, without our cookie."""


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
        rows = [(one.name, self.site.watching.row(one.path)) for one in part]
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
        shown = self.site.watching.run(path)
        body = {runs.FOLDS: "folds_body.html.j2", runs.SEARCH: "study_body.html.j2"}.get(shown.row.kind, "")
        inside = [] if shown.row.kind == runs.RUN else runs.members(path)
        members = [(self.site.places.name(one.folder), one) for one in inside[:200]]
        return self.site.show(
            request, "run.html.j2", name=name, body=body, members=members, **self._of_run(path, shown)
        )

    def head(self, request: Request) -> Response:
        """Show the part of a run's page that changes as it goes."""
        name, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        return self.site.part(request, shown, "run_head.html.j2", lambda: {"name": name, **self._of_run(path, shown)})

    def part(self, request: Request) -> Response:
        """Show one part of a run's page as it is now."""
        name, path = self.site.run_named(request.query_params)
        wanted = request.query_params.get("part", "")
        shown = self.site.watching.run(path)
        known = wanted == "files" or (shown.view is not None and shown.row.kind == runs.RUN)
        if wanted not in _PARTS or not known:
            return HTMLResponse("", 404)
        return self.site.part(request, shown, _PARTS[wanted], lambda: {"name": name, **self._of_run(path, shown)})

    def _of_run(self, path: Path, shown: Shown) -> dict[str, Any]:
        log = path / places.LOG
        command = shlex.join(["hotloop", *going_on(path, shown.row.kind)])
        return {
            "shown": shown, "row": shown.row, "view": shown.view, "tone": TONES.get(shown.status, "bad"),
            "log": _plain(places.tail(log)), "samples": places.samples(path)[:12], "checkpoints": _checkpoints(path),
            "exported": places.exported(path),
            "again": command, "goes_on": _goes_on(path, shown), "folder": str(path),
            "started_as": processes.arguments_of(path), **self._now(path, shown),
        }  # fmt: skip

    def _now(self, path: Path, shown: Shown) -> dict[str, Any]:
        """Return what a run's process takes now, and how far its compiles are."""
        if shown.process is None or shown.compiles is None:
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
            return watching.run(path).pause if path.is_dir() else GONE_SECONDS

        seen = request.query_params.get("seen")
        return self.site.news(lambda: str(watching.run(path).serial), pause, seen)

    def charts(self, request: Request) -> Response:
        """Return the charts of a run as JSON, thinned to what a screen can show."""
        _, path = self.site.run_named(request.query_params)
        shown = self.site.watching.run(path)
        if "charts" not in shown.parts:
            spent, charts = time.thread_time(), shown.view.charts if shown.view else ()
            shown.parts["charts"] = bytes(JSONResponse([chart.to_json() for chart in charts]).body)
            shown.seconds += time.thread_time() - spent
        return Response(shown.parts["charts"], media_type="application/json")

    def sample(self, request: Request) -> Response:
        """Return a picture among a run's samples."""
        _, path = self.site.run_named(request.query_params)
        content, kind = places.picture(path, request.query_params.get("name", ""))
        return Response(content, media_type=kind, headers={"content-security-policy": "default-src 'none'; sandbox"})

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

    def compare(self, request: Request) -> Response:
        """Show several runs side by side: settings that differ, figures, and their losses in one chart."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]
        found = [(name, self.site.watching.run(self.site.places.find(name))) for name in names]
        settings = _beside([one.row.settings for _, one in found])
        other = {key: values for key, values in settings.items() if any(one != values[0] for one in values)}
        differ = {key: list(map(text, values)) for key, values in other.items()}
        rows = [(shown.status, shown.row) for _, shown in found]
        facts = [{"status": status, "ran": row.tier, "steps": row.steps, **row.figures} for status, row in rows]
        figures = {key: [quantity(key, each) for each in row] for key, row in _beside(facts).items()}
        return self.site.show(request, "compare.html.j2", names=names, differ=differ, figures=figures)

    def compare_charts(self, request: Request) -> Response:
        """Return the losses of several runs as one chart."""
        lines = []
        for name in list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]:
            view = self.site.watching.run(self.site.places.find(name)).view
            chart = next((one for one in getattr(view, "charts", ()) if one.key == "loss"), None)
            if chart is not None:
                which = next((i for i, style in enumerate(chart.styles) if style == "line"), 0)
                pairs = zip(chart.steps, chart.columns[which], strict=True)
                lines.append(Line.of(line(name, 80), pairs))
        lines = [one for one in lines if one]
        charts = [Chart.of("loss", "Training loss", lines, ["line"] * len(lines), wide=True)] if lines else []
        return JSONResponse([one.to_json() for one in charts])


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


def _beside(columns: list[Any]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for one in columns for name in one)
    return {name: [one.get(name) for one in columns] for name in names}


def _plain(log: str) -> str:
    """Return the end of a log without what a terminal would act on; of a line that was overwritten, its last text."""
    return "\n".join(text(one.rsplit("\r", 1)[-1]) for one in log.replace("\r\n", "\n").split("\n"))
