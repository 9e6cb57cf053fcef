"""The page on which a run is set up: its form, what would run, a check without training, and the start."""

from __future__ import annotations

import urllib.parse
from typing import TYPE_CHECKING, Any

from starlette.responses import RedirectResponse

from hotloop import measured
from hotloop.errors import ConfigError, HotloopError, RecordError
from hotloop.report import runs
from hotloop.report.text import text
from hotloop.train import conf_files, configure, nested
from hotloop.ui import compilation, drafts, processes
from hotloop.ui.drafts import CHOICE, Draft
from hotloop.ui.fields import override
from hotloop.ui.probe import UnreadError
from hotloop.ui.run_acts import back_to
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site

BEST = "best.yaml"
"""The settings of a search's best trial, in its folder."""
_GROUPS = ("training", "training.optimization", "compile", "compile.components")
"""What the modes of compilation are read from."""


class TrainingPages:
    """Answers requests about a run that is to be started."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def form(self, request: Request) -> Response:
        """Show the form of a recipe or a program, empty or with the settings of a run, without running a program."""
        asked = dict(request.query_params)
        try:
            return self._page(request, self._asked(asked, may_run=False), sent="loaded" if asked.get("from") else "")
        except UnreadError as error:
            return self.site.show(request, "unread.html.j2", asked=asked, program=str(error))
        except (ConfigError, RecordError) as error:
            return self._refused(request, error)

    def read(self, request: Request) -> Response:
        """Find the settings of what the form names, for which a program's file runs, and go on to show them."""
        form = form_of(request)
        try:
            _ = self._asked(form, may_run=True).groups
        except (ConfigError, RecordError) as error:
            return self._refused(request, error)
        named = {name: value for name, value in form.items() if value}
        return RedirectResponse(f"/training?{urllib.parse.urlencode(named)}", 303)

    def _asked(self, asked: Mapping[str, str], *, may_run: bool) -> Draft:
        """Return the draft of what an address or a form names: a recipe, a program or a run."""
        if run := asked.get("from"):
            asked = self._of_run(self.site.places.find(run), may_run=may_run)
        return self._draft(asked, may_run=may_run)

    def preview(self, request: Request) -> Response:
        """Show what would run, and what is wrong, beside the fields."""
        try:
            draft = self._draft(form_of(request), may_run=True)
            draft.read()
        except ConfigError as error:
            return self.site.show(request, "preview.html.j2", draft=None, why=str(error))
        return self.site.show(request, "preview.html.j2", draft=draft, why="")

    def check(self, request: Request) -> Response:
        """Check all but the step itself, in a process of its own: nothing is trained or written."""
        try:
            draft = self._draft(form_of(request), may_run=True)
            draft.read()
            if draft.errors:
                return self.site.show(request, "checked.html.j2", why="Nothing was checked: mend that first.")
            code, out, err = processes.ask(draft.command("--dry-run"))
        except ConfigError as error:
            return self.site.show(request, "checked.html.j2", why=str(error))
        return self.site.show(request, "checked.html.j2", why="", code=code, said=text((out + err).strip()[-8000:]))

    def start(self, request: Request) -> Response:
        """Start the run and show it, or show the form again with all that is wrong."""
        try:
            draft = self._draft(form_of(request), may_run=True)
            draft.read()
            if draft.errors:
                return self._page(request, draft, 422, sent="typed")
            if draft.where:
                return self._submitted(request, draft)
            folder = draft.folder()
            key = "hpo.folder" if draft.verb == "hpo" else "run.folder"
            processes.start(folder, [draft.verb, *draft.overrides, override(key, str(folder))])
        except HotloopError as error:
            return self._refused(request, error)
        self.site.places.forget()
        return back_to(self.site.places.name(folder))

    def _submitted(self, request: Request, draft: Draft) -> Response:
        """Hand the run to a cluster; the command line follows and fetches it."""
        code, out, err = processes.ask(draft.command())
        words: dict[str, Any] = (
            {"title": "Submitted", "tone": "good"} if code == 0 else {"title": "Not submitted", "tone": "bad"}
        )
        said = f"On {draft.where}"
        return self.site.said(request, said, 200 if code == 0 else 422, log=text((out + err).strip()), **words)

    def _draft(self, form: Mapping[str, str], *, may_run: bool) -> Draft:
        return drafts.of(form, self.site.probe.answer()["components"], self.site.places.root, may_run=may_run)

    def _of_run(self, folder: Path, *, may_run: bool) -> dict[str, str]:
        """Return the form that stands for a run, for the best trial of a search, or for a start that failed.

        Raises:
            ConfigError: there are no settings of it, or they cannot be read.
        """
        file = folder / (BEST if runs.kind_of(folder) == runs.SEARCH else runs.SETTINGS)
        started = processes.arguments_of(folder)
        if file.exists() or not started:
            return self._of_values(conf_files.read(file), may_run=may_run)
        return {**self._of_values(configure.compose(started[1:]), may_run=may_run), "verb": started[0]}

    def _of_values(self, values: Mapping[str, Any], *, may_run: bool) -> dict[str, str]:
        """Return the form that stands for settings.

        Raises:
            ConfigError: there is no such recipe or program.
        """
        recipe = str(compilation.at(values, "recipe.name") or "")
        found = {"program" if ":" in recipe else "recipe": recipe}
        draft = self._draft(found, may_run=may_run)
        plain = dict(nested.leaves(values))
        for field in draft.fields:
            if field.name in plain:
                found[field.name] = field.text(plain[field.name])
            elif isinstance(part := compilation.at(values, field.name), dict):
                found[field.name] = field.text(part)
        whole = nested.merge({**draft.base}, values)
        for group in _GROUPS:  # a stranger may have written them
            if not isinstance(compilation.at(whole, group), dict):
                raise ConfigError(f"{group}: expected a group of settings")
        if plain.get("kfold.n_splits") is not None:  # else the same settings would hold out other rows
            found["verb"] = "kfold"
        return found | compilation.form_of(whole, draft.components)

    def _page(self, request: Request, draft: Draft, status: int = 200, *, sent: str = "") -> Response:
        probe = self.site.probe.answer()
        if not draft.changes and not draft.errors:
            draft.read()
        key = "program" if ":" in draft.recipe else "recipe"
        back = {key: draft.recipe, **{f"{CHOICE}{group}": name for group, name in draft.choices.items()}}
        usual = compilation.form_of(draft.base, draft.components)
        return self.site.show(
            request, "training.html.j2", status, draft=draft, sent=sent, recipes=drafts.RECIPES, verbs=drafts.VERBS,
            choices=drafts.choices_of(draft), choice=CHOICE, probe=probe, back=back, usual=usual,
            modes=compilation.modes({} if draft.where else probe["missing"]), as_above=compilation.AS_ABOVE,
            now=compilation.form_of(draft.values(), draft.components), only=compilation.ONLY,
            measured_on=measured.MACHINE,
        )  # fmt: skip

    def _refused(self, request: Request, error: Exception) -> Response:
        """Show what is wrong with the recipe, the program or the folder."""
        return self.site.said(request, str(error), 422, title="Training", back="/training", label="Back to the form")
