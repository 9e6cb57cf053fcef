"""What a person may do to a run: stop, resume, delete, ask it for a checkpoint or samples, and export weights."""

from __future__ import annotations

import os
import shutil
import urllib.parse
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from starlette.responses import RedirectResponse, Response, StreamingResponse

from hotloop.errors import ConfigError, HotloopError
from hotloop.report import runs
from hotloop.train import configure, removal, requests
from hotloop.ui import places, processes
from hotloop.ui.fields import to_text
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from hotloop.ui.site import Site

STUDY = "study.yaml"
"""The settings that a search keeps in its folder, by which it goes on."""
EXPORT_SECONDS = 300.0
FORMATS = ("safetensors", "pretrained")
"""Of `hotloop export`. The first needs weights alone; the other makes the model again, by the program of the run."""


class RunActs:
    """Answers requests that change a run, or that make something of it."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def stop(self, request: Request) -> Response:
        """Ask a run to stop after its step."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        try:
            processes.stop(path, at_once=form.get("at_once") == "yes")
        except HotloopError as error:
            return self._refused(request, name, error)
        return back_to(name)

    def resume(self, request: Request) -> Response:
        """Go on with a run where its last checkpoint is, or with the trials of a search that are left."""
        name, path = self.site.run_named(form_of(request))
        shown = self.site.watching.run(path)
        try:
            remote = self.site.elsewhere.run_of(path)
            if shown.process is not None or (shown.runs_now and not remote):
                return back_to(name)
            if remote:
                self.site.elsewhere.follow(path)
            else:
                processes.start(path, going_on(path, shown.row.kind))
        except HotloopError as error:
            return self._refused(request, name, error)
        return back_to(name)

    def delete(self, request: Request) -> Response:
        """Delete a run once a person has said a second time that it is to go."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        if form.get("sure") != "yes":
            return self.site.show(request, "delete.html.j2", name=name, many=removal.files(path))
        try:
            if process := processes.find(path):
                gone = "" if process.here else f". If its cluster is gone for good: {removal.forgetting(path)}"
                return self._refused(request, name, f"it runs now. Stop it first{gone}")
            if (path / places.START).is_file() and runs.kind_of(path) == runs.UNKNOWN:
                shutil.rmtree(path)  # it ended before it had a record
            else:
                removal.remove([path])
        except HotloopError as error:
            return self._refused(request, name, error)
        self.site.places.forget()
        return RedirectResponse("/runs", 303)

    def _refused(self, request: Request, name: str, why: object) -> Response:
        return self.site.show(request, "refused.html.j2", 409, name=name, why=str(why))

    def ask(self, request: Request) -> Response:
        """Ask a run for something that it answers after its step: a checkpoint."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        what = form.get("what", "")
        if processes.find(path) is None or what != requests.SAVE:
            return self._refused(request, name, f"{what[:80]}: the run does not answer that now")
        try:
            requests.ask(path)
        except OSError as error:
            return self._refused(request, name, f"the run cannot be asked: {error}")
        return back_to(name)

    def export(self, request: Request) -> Response:
        """Export a checkpoint, in a process of its own; a format that runs the run's program is asked for twice."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        wanted, kind = form.get("checkpoint", ""), form.get("format", FORMATS[0])
        if wanted not in ("best", "last"):
            return self._refused(request, name, f"checkpoint={wanted[:80]!r}: expected best or last")
        if kind not in FORMATS:
            return self._refused(request, name, f"format={kind[:80]!r}: expected one of {', '.join(FORMATS)}")
        if kind != FORMATS[0] and form.get("sure") != "yes":
            return self.site.show(
                request, "export.html.j2", name=name, checkpoint=wanted, format=kind, folder=str(path)
            )
        out = _free(path, f"{places.EXPORTS}{wanted}" + ("" if kind == FORMATS[0] else f"-{kind}"))
        command = ["export", str(path), str(out), "--checkpoint", wanted, "--format", kind]
        try:
            code, _, err = processes.ask(command, EXPORT_SECONDS)
        except ConfigError as error:
            return self._refused(request, name, error)
        if code:
            return self._refused(request, name, err.strip()[-4000:] or f"hotloop export ended with exit code {code}")
        return back_to(name, "exported")

    def exported(self, request: Request) -> Response:
        """Return a file of a run's exports, to be kept."""
        _, path = self.site.run_named(request.query_params)
        name = request.query_params.get("name", "")
        file = places.open_exported(path, name)
        kept = urllib.parse.quote(PurePosixPath(name).name, safe="")
        headers = {"content-disposition": f"attachment; filename*=UTF-8''{kept}"}
        return StreamingResponse(places.chunks(file), media_type="application/octet-stream", headers=headers)


def going_on(path: Path, kind: str) -> list[str]:
    """Return the arguments that go on with a run, a cross-validation or a search: nothing of them is the folder's."""
    if kind == runs.SEARCH:
        return ["hpo", "--config", str(path / STUDY), f"hpo.folder={to_text(str(path))}"]
    return ["kfold" if kind == runs.FOLDS else "train", configure.resume(path)]


def _free(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder that is not there yet, with a number where others are."""
    tried = (folder / f"{name}{number}" for number in ("", *(f"-{one}" for one in range(2, 1000))))
    return next(one for one in tried if not os.path.lexists(one))  # a link that leads nowhere yet is taken


def back_to(name: str, part: str = "") -> Response:
    """Return the way back to the page of a run."""
    return RedirectResponse(f"/run?run={urllib.parse.quote(name, safe='')}{part and '#'}{part}", 303)
