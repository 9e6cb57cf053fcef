"""The application: which address is answered by what, and what is said where something cannot be found or done."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from hotloop.errors import HotloopError
from hotloop.ui.bundle_pages import BundlePages
from hotloop.ui.cluster_pages import ClusterPages
from hotloop.ui.compare_pages import ComparePages
from hotloop.ui.machine_pages import MachinePages
from hotloop.ui.plot_pages import PlotPages
from hotloop.ui.preset_pages import PresetPages
from hotloop.ui.queue_pages import QueuePages
from hotloop.ui.run_acts import RunActs
from hotloop.ui.run_pages import RunPages
from hotloop.ui.security import Guard
from hotloop.ui.site import Site, asset
from hotloop.ui.training_pages import TrainingPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from starlette.requests import Request
    from starlette.types import ASGIApp

    from hotloop.ui.probe import Probe
    from hotloop.ui.security import Access


QUEUE_SECONDS = 2.0
"""How often the queue is looked at."""


def application(root: Path, access: Access, probe: Probe | None = None) -> ASGIApp:
    """Return the application of a runs folder.

    Args:
        root: the runs folder, which need not be there yet.
        access: who may ask.
        probe: what this machine can run; None asks it.
    """
    site = Site(root, access, probe)

    def not_found(request: Request, error: Exception) -> Response:
        del error
        return site.show(request, "refused.html.j2", 404, name="", why="There is no such page, run or file here.")

    def refused(request: Request, error: Exception) -> Response:
        return site.show(request, "refused.html.j2", 409, name="", why=str(error))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        site.probe.begin()
        queue = asyncio.create_task(_keep_starting(site))
        yield
        site.stopping = True
        queue.cancel()

    answers: dict[Any, Callable[[Request, Exception], Response]] = {
        LookupError: not_found, KeyError: not_found, 404: not_found, HotloopError: refused,
    }  # fmt: skip
    app = Starlette(routes=routes(site), exception_handlers=answers, lifespan=lifespan)
    return Guard(app, access, dict.fromkeys(_TO_THE_FORM, TrainingPages(site).keyless))


_TO_THE_FORM = ("/training/start", "/training/queue", "/training/read")
"""The addresses that the page on which a run is set up sends forms to."""


async def _keep_starting(site: Site) -> None:
    """Start what is queued, one run after another, as long as the server runs."""
    while True:
        await asyncio.sleep(QUEUE_SECONDS)
        await asyncio.to_thread(site.queue.look)


def routes(site: Site) -> list[Route]:
    """Return every address; what changes something is asked by POST alone, which `Guard` lets through with a form."""
    run, training, machine = RunPages(site), TrainingPages(site), MachinePages(site)
    queue, preset, act = QueuePages(site), PresetPages(site), RunActs(site)
    bundle, compare, plot, cluster = BundlePages(site), ComparePages(site), PlotPages(site), ClusterPages(site)
    asked = {
        "/": lambda request: RedirectResponse("/runs"),  # noqa: ARG005 - whoever asks
        "/static/{name}": _static,
        "/runs": run.runs, "/runs/table": run.table, "/runs/news": run.list_news, "/runs/queue": queue.part,
        "/run": run.run, "/run/head": run.head, "/run/now": run.now, "/run/part": run.part, "/run/news": run.run_news,
        "/run/charts": run.charts, "/run/sample": run.sample, "/run/report": run.report, "/run/settings": run.settings,
        "/run/usage": run.usage, "/run/plots": plot.plots, "/run/plots/figures": plot.figures,
        "/plotly.js": plot.script,
        "/compare": compare.compare, "/compare/charts": compare.charts, "/compare/frames": compare.frames,
        "/compare/tables": compare.tables, "/compare/news": compare.news,
        "/run/exported": act.exported, "/training": training.form,
        "/machine": machine.machine, "/machine/now": machine.now,
        "/clusters": cluster.show, "/cache/bundles": bundle.show, "/cache/bundle": bundle.bundle,
    }  # fmt: skip
    done = {
        "/machine/findings": machine.findings,
        "/run/stop": act.stop, "/run/resume": act.resume, "/run/delete": act.delete,
        "/run/ask": act.ask, "/run/export": act.export, "/training/read": training.read,
        "/training/preview": training.preview, "/training/check": training.check,
        "/training/start": training.start, "/training/queue": training.queue, "/queue/remove": queue.remove,
        "/presets/save": preset.save, "/presets/delete": preset.delete, "/presets/diff": preset.diff,
        "/presets/panel": preset.show, "/cache/export": bundle.export, "/cache/import": bundle.import_,
        "/clusters/add": cluster.add, "/clusters/remove": cluster.remove,
    }  # fmt: skip
    # A form that was refused has the address that it was sent to.
    asked |= dict.fromkeys(_TO_THE_FORM, lambda request: RedirectResponse("/training"))  # noqa: ARG005
    gets = [Route(path, answer, methods=["GET"]) for path, answer in asked.items()]
    return gets + [Route(path, answer, methods=["POST"]) for path, answer in done.items()]


def _static(request: Request) -> Response:
    content, kind = asset(request.path_params["name"])
    return PlainTextResponse(content, media_type=kind)
