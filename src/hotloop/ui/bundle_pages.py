"""Bundles of compiled code: export what is kept here, and import what another machine of this kind made."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import Response, StreamingResponse

from hotloop import files, record
from hotloop.errors import ConfigError
from hotloop.ui import processes
from hotloop.ui.fields import shortened
from hotloop.ui.places import chunks, opened
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from starlette.requests import Request

    from hotloop.ui.site import Site

FOLDER = ".hotloop-ui/bundles"
"""Below the runs folder: hidden, so that no run is looked for in it."""
_NAME = re.compile(r"hotloop-\d{8}-\d{6}\.zip", re.ASCII)
_SECONDS = 300.0
_SUM = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Exported:
    """A bundle that was exported by the page; its checksum is empty where that is not known any more."""

    name: str
    size: int
    checksum: str


class BundlePages:
    """Answers requests about bundles, by the commands of hotloop that a terminal would use."""

    def __init__(self, site: Site) -> None:
        self.site, self._folder = site, site.places.root / FOLDER

    def show(self, request: Request) -> Response:
        """Show the bundles that are there, and the form to import one."""
        return self._panel(request)

    def export(self, request: Request) -> Response:
        """Export what is kept and fits this machine."""
        name = time.strftime("hotloop-%Y%m%d-%H%M%S.zip")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            told = _asked(["cache", "export", str(self._folder / name), "--json"])
            with files.whole(self._folder / f"{name}.json", durable=False) as file:
                file.write(record.to_json(told).encode())
        except (OSError, ConfigError) as error:
            return self._panel(request, why=str(error))
        return self._panel(request, done=f"Exported {told.get('files')} files as {name}.")

    def import_(self, request: Request) -> Response:
        """Import a bundle, once a person has said that its code may run as them."""
        form = form_of(request)
        file, checksum = form.get("bundle", "").strip(), form.get("checksum", "").strip()
        if not os.path.isfile(file):  # noqa: PTH113 - of any length
            why = f"bundle={shortened(file)!r}: there is no such file on the machine of this server"
            return self._panel(request, why=why)
        if checksum and not _SUM.fullmatch(checksum):
            return self._panel(request, why=f"checksum={checksum[:80]!r}: expected the 64 digits that the export told")
        if form.get("sure") != "yes":
            return self._panel(request, asks=True)
        command = ["cache", "import", "--json", *(["--checksum", checksum] if checksum else []), "--", file]
        try:
            told = _asked(command)
        except ConfigError as error:
            return self._panel(request, why=str(error))
        return self._panel(request, done=f"Imported {told.get('files')} files.")

    def bundle(self, request: Request) -> Response:
        """Return a bundle, to be kept."""
        name = request.query_params.get("name", "")
        if not _NAME.fullmatch(name):
            raise LookupError(name)
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(chunks(opened(self._folder / name)), media_type="application/zip", headers=headers)

    def _panel(self, request: Request, **said: Any) -> Response:
        form = form_of(request) if request.method == "POST" else {}
        typed = {name: "" if said.get("done") else form.get(name, "").strip() for name in ("bundle", "checksum")}
        usual = {"why": "", "done": "", "asks": False, "bundles": self._bundles(), **typed}
        answer = self.site.show(request, "bundles.html.j2", **{**usual, **said})
        if said.get("done"):
            self.site.machine, answer.headers["hx-trigger"] = None, "bundled"  # other code is kept now
        return answer

    def _bundles(self) -> list[Exported]:
        try:
            files = [one for one in os.scandir(self._folder) if _NAME.fullmatch(one.name)]
        except OSError:
            return []
        found = []
        for one in sorted(files, key=lambda file: file.name, reverse=True):
            if one.is_file(follow_symlinks=False):
                told = str(processes.read(self._folder / f"{one.name}.json").get("checksum", ""))
                found.append(Exported(one.name, one.stat().st_size, told if _SUM.fullmatch(told) else ""))
        return found


def _asked(arguments: list[str]) -> dict[str, Any]:
    """Return what a command prints.

    Raises:
        ConfigError: it failed, with what it said.
    """
    code, out, err = processes.ask(arguments, _SECONDS)
    try:
        found = json.loads(out) if not code else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(err.strip()[-4000:] or f"hotloop cache ended with exit code {code}")
    return found
