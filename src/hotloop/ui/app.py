"""The application: which address is answered by what, and what is said where something cannot be found or done."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from hotloop.errors import HotloopError
from hotloop.ui.compare_pages import ComparePages
from hotloop.ui.machine_pages import MachinePages
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
        return site.said(request, "There is no such page, run or file here.", 404)

    def refused(request: Request, error: Exception) -> Response:
        return site.said(request, str(error))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        site.probe.begin()
        yield
        site.stopping = True

    answers: dict[Any, Callable[[Request, Exception], Response]] = {
        LookupError: not_found, KeyError: not_found, 404: not_found, HotloopError: refused,
    }  # fmt: skip
    return Guard(Starlette(routes=routes(site), exception_handlers=answers, lifespan=lifespan), access)


def routes(site: Site) -> list[Route]:
    """Return every address; what changes something is asked by POST alone, which `Guard` lets through with a form."""
    run, training, machine = RunPages(site), TrainingPages(site), MachinePages(site)
    act, compare = RunActs(site), ComparePages(site)
    asked = {
        "/": lambda request: RedirectResponse("/runs"),  # noqa: ARG005 - whoever asks
        "/static/{name}": _static,
        "/runs": run.runs, "/runs/table": run.table, "/runs/news": run.list_news,
        "/run": run.run, "/run/now": run.now, "/run/frames": run.frames, "/run/news": run.run_news,
        "/run/charts": run.charts, "/run/sample": run.sample, "/run/report": run.report, "/run/plots": run.plots,
        "/run/settings": run.settings, "/compare": compare.compare, "/compare/charts": compare.charts,
        "/training": training.form, "/machine": machine.machine,
        # A form that was refused has the address that it was sent to.
        "/training/start": _to_the_form, "/training/read": _to_the_form,
    }  # fmt: skip
    done = {
        "/machine/findings": machine.findings, "/run/stop": act.stop, "/run/resume": act.resume,
        "/run/delete": act.delete, "/run/save": act.save, "/run/export": act.export,
        "/training/read": training.read, "/training/preview": training.preview, "/training/check": training.check,
        "/training/start": training.start,
    }  # fmt: skip
    gets = [Route(path, answer, methods=["GET"]) for path, answer in asked.items()]
    return gets + [Route(path, answer, methods=["POST"]) for path, answer in done.items()]


def _to_the_form(request: Request) -> Response:
    del request
    return RedirectResponse("/training")


def _static(request: Request) -> Response:
    content, kind = asset(request.path_params["name"])
    return PlainTextResponse(content, media_type=kind)
