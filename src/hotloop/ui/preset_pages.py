"""The panel of presets beside the form: save, load, compare and delete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.report.text import text
from hotloop.ui import drafts, presets
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site

FORM, DEFAULTS = "(form)", "(defaults)"
"""What may be compared beside presets; no preset can have such a name."""


class PresetPages:
    """Answers requests about presets. Each answer is the panel as it is then, with what was done or is to be asked."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def save(self, request: Request) -> Response:
        """Keep the settings of the form; one that is there is replaced once a person has said so."""
        form = form_of(request)
        name = form.get("preset-name", "").strip()
        try:
            there = self.site.presets.file(name).exists()
            if there and form.get("sure") != "yes":
                return self._panel(request, asks="save", name=name)
            values = self._form_values(form)
            self.site.presets.save(name, values)
        except ConfigError as error:
            return self._panel(request, why=str(error), name=name)
        return self._panel(request, done=f"Saved as {name}.")

    def delete(self, request: Request) -> Response:
        """Delete a preset once a person has said a second time that it is to go."""
        form = form_of(request)
        name = form.get("preset", "")
        try:
            self.site.presets.file(name)
            if form.get("sure") != "yes":
                return self._panel(request, asks="delete", name=name)
            self.site.presets.delete(name)
        except ConfigError as error:
            return self._panel(request, why=str(error))
        return self._panel(request, done=f"{name} is deleted.")

    def show(self, request: Request) -> Response:
        """Show the panel as it is now: what was asked is let be."""
        return self._panel(request)

    def diff(self, request: Request) -> Response:
        """Show what differs between two presets, or between one and the form or the defaults."""
        form = form_of(request)
        sides = [form.get("preset", ""), form.get("against", FORM)]
        try:
            first, second = (self._side(one, form) for one in sides)
        except ConfigError as error:
            return self._panel(request, why=str(error))
        found = {key: [*map(_shown, pair)] for key, pair in presets.beside(first, second).items()}
        return self._panel(request, sides=[one.strip("()") for one in sides], differ=found)

    def _side(self, name: str, form: Mapping[str, str]) -> dict[str, Any]:
        if name == FORM:
            return self._form_values(form)
        return self._draft(form).base if name == DEFAULTS else self.site.presets.values(name)

    def _form_values(self, form: Mapping[str, str]) -> dict[str, Any]:
        """Return the settings of the form.

        Raises:
            ConfigError: something in it is wrong.
        """
        draft = self._draft(form)
        draft.read(whole=True)
        draft.errors.pop("name", None)  # of the run, which no preset has
        if draft.errors:
            raise ConfigError("The form has mistakes. Mend them first: they stand beside their fields.")
        return presets.whole(draft.values())

    def _draft(self, form: Mapping[str, str]) -> drafts.Draft:
        known = self.site.probe.answer()["components"]
        return drafts.of(form, known, self.site.places.root, may_run=True)  # each of these is a POST

    def _panel(self, request: Request, **values: Any) -> Response:
        form = form_of(request)
        kept = {**form, "preset-name": ""} if values.get("done") else form
        return self.site.show(request, "presets.html.j2", **{**panel(self.site, kept), **values})


def panel(site: Site, form: Mapping[str, str]) -> dict[str, Any]:
    """Return what the panel shows, with what was chosen and typed in it."""
    return {
        "presets": site.presets.names(), "chosen": form.get("preset", ""), "against": form.get("against", FORM),
        "typed": form.get("preset-name", ""), "form": FORM, "defaults": DEFAULTS, "why": "", "done": "", "asks": "",
        "sides": (), "differ": {},
    }  # fmt: skip


def _shown(value: Any) -> str:
    return "not set" if value is None else text(value)
