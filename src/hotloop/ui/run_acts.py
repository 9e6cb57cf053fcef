"""What a person may do to a run: stop, resume, delete, ask it for a checkpoint, and export weights."""

from __future__ import annotations

import secrets
import shutil
import urllib.parse
from typing import TYPE_CHECKING, Any

from starlette.responses import RedirectResponse, Response

from hotloop.errors import ConfigError, HotloopError
from hotloop.report import runs
from hotloop.train import configure, removal, requests
from hotloop.ui import places, processes
from hotloop.ui.fields import override
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from pathlib import Path

    from starlette.requests import Request

    from hotloop.ui.site import Site

STUDY = "study.yaml"
"""The settings that a search keeps in its folder, by which it goes on."""
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
            return self._said(request, name, str(error))
        return back_to(name)

    def resume(self, request: Request) -> Response:
        """Go on with a run where its last checkpoint is, or with the trials of a search that are left."""
        name, path = self.site.run_named(form_of(request))
        shown = self.site.watching.run(path)
        try:
            if not shown.runs_now:
                processes.start(path, going_on(path, shown.row.kind))
        except HotloopError as error:
            return self._said(request, name, str(error))
        return back_to(name)

    def delete(self, request: Request) -> Response:
        """Delete a run once a person has said a second time that it is to go."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        if form.get("sure") != "yes":
            words = f"{removal.files(path)} files, with its checkpoints. This cannot be undone."
            act = _sure("/run/delete", name, "Delete for good", "danger")
            return self._said(request, name, words, 200, title=f"Delete {name}?", act=act)
        try:
            if processes.find(path):
                raise ConfigError("it runs now. Stop it first")
            if (path / places.START).is_file() and runs.kind_of(path) == runs.UNKNOWN:
                shutil.rmtree(path)  # it ended before it had a record
            else:
                removal.remove([path])
        except HotloopError as error:
            return self._said(request, name, str(error))
        self.site.places.forget()
        return RedirectResponse("/runs", 303)

    def save(self, request: Request) -> Response:
        """Ask a run for a checkpoint, which it writes after its step."""
        name, path = self.site.run_named(form_of(request))
        if processes.find(path) is None:
            return self._said(request, name, "The run does not answer that now")
        try:
            requests.ask(path)
        except OSError as error:
            return self._said(request, name, f"the run cannot be asked: {error}")
        return back_to(name)

    def export(self, request: Request) -> Response:
        """Export a checkpoint, in a process of its own; a format that runs the run's program is asked for twice."""
        form = form_of(request)
        name, path = self.site.run_named(form)
        wanted, kind = form.get("checkpoint", ""), form.get("format", FORMATS[0])
        if wanted not in ("best", "last") or kind not in FORMATS:
            return self._said(request, name, f"{wanted[:80]!r} as {kind[:80]!r} cannot be exported")
        if kind != FORMATS[0] and form.get("sure") != "yes":
            words = (
                f"The weights of checkpoints/{wanted}.pt alone are not enough for it: the model is made again, by the "
                "program that this checkpoint names. It runs as you. Go on where you made this run, or trust who did."
            )
            act = _sure("/run/export", name, f"Export as {kind}", "primary", checkpoint=wanted, format=kind)
            return self._said(request, name, words, 200, title=f"Export {name} as {kind}?", tone="warn", act=act)
        out = path / f"export-{wanted}-{kind}-{secrets.token_hex(2)}"
        try:
            code, _, err = processes.ask(["export", str(path), str(out), "--checkpoint", wanted, "--format", kind])
        except ConfigError as error:
            return self._said(request, name, str(error))
        if code:
            return self._said(request, name, err.strip()[-4000:] or f"hotloop export ended with exit code {code}")
        return self._said(request, name, f"Exported to {out}", 200, title="Exported", tone="good")

    def _said(self, request: Request, name: str, words: str, status: int = 409, **more: Any) -> Response:
        back = f"/run?run={urllib.parse.quote(name, safe='')}"
        return self.site.said(request, words, status, back=back, label="Back to the run", **more)


def _sure(action: str, name: str, label: str, tone: str, **fields: str) -> dict[str, Any]:
    """Return the button that says once more what is to be done."""
    extra = [*fields.items(), ("sure", "yes")]
    return {"action": action, "name": name, "label": label, "class": tone, "extra": extra}


def going_on(path: Path, kind: str) -> list[str]:
    """Return the arguments that go on with a run, a cross-validation or a search: nothing of them is the folder's."""
    if kind == runs.SEARCH:
        return ["hpo", "--config", str(path / STUDY), override("hpo.folder", str(path))]
    return ["kfold" if kind == runs.FOLDS else "train", configure.resume(path)]


def back_to(name: str) -> Response:
    """Return the way back to the page of a run."""
    return RedirectResponse(f"/run?run={urllib.parse.quote(name, safe='')}", 303)
