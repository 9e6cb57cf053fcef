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
from hotloop.ui import compilation, drafts, processes, ranges
from hotloop.ui.drafts import CHOICE, Draft
from hotloop.ui.preset_pages import panel
from hotloop.ui.program_schema import UnreadError
from hotloop.ui.run_acts import back_to
from hotloop.ui.site import form_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from starlette.requests import Request
    from starlette.responses import Response

    from hotloop.ui.site import Site

CHECK_SECONDS = 300.0
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
            sent = "loaded" if asked.get("from") or asked.get("preset") else ""
            return self._page(request, self._asked(asked, may_run=False), sent=sent)
        except UnreadError as error:
            return self.site.show(request, "unread.html.j2", asked=asked, program=str(error))
        except (ConfigError, RecordError) as error:
            return self._unusable(request, asked, error)

    def read(self, request: Request) -> Response:
        """Find the settings of what the form names, for which a program's file runs, and go on to show them."""
        form = form_of(request)
        try:
            _ = self._asked(form, may_run=True).groups
        except (ConfigError, RecordError) as error:
            return self._unusable(request, form, error)
        named = {name: value for name, value in form.items() if value}
        return RedirectResponse(f"/training?{urllib.parse.urlencode(named)}", 303)

    def keyless(self, request: Request, form: Mapping[str, str], why: str) -> Response:
        """Show a form again that nothing may be done with, since its browser has not brought the key."""
        return self._unusable(request, form, ConfigError(why), 403)

    def _asked(self, asked: Mapping[str, str], *, may_run: bool) -> Draft:
        """Return the draft of what an address or a form names: a recipe, a program, a run or a preset."""
        if run := asked.get("from"):
            asked = self._of_run(self.site.places.find(run), may_run=may_run)
        elif preset := asked.get("preset"):
            asked = {**self._of_values(self.site.presets.values(preset), may_run=may_run), "preset": preset}
        return self._draft(asked, may_run=may_run)

    def preview(self, request: Request) -> Response:
        """Show what would run, and what is wrong, beside the fields."""
        try:
            draft = self._draft(form_of(request), may_run=True)
            draft.read()
        except ConfigError as error:
            return self.site.show(request, "preview.html.j2", draft=None, why=str(error))
        mode = compilation.mode_of(draft.values())
        return self.site.show(request, "preview.html.j2", draft=draft, why="", shown_mode=mode)

    def check(self, request: Request) -> Response:
        """Check all but the step itself, in a process of its own: nothing is trained or written."""
        try:
            draft = self._draft(form_of(request), may_run=True)
            draft.read()
            if draft.errors:
                return self.site.show(request, "checked.html.j2", why="Nothing was checked: mend that first.")
            code, out, err = processes.ask(_dry(draft), CHECK_SECONDS)
        except ConfigError as error:
            return self.site.show(request, "checked.html.j2", why=str(error))
        return self.site.show(
            request, "checked.html.j2", why="", code=code, said=text((out + err).strip()[-8000:]), fixed=draft.fixed
        )

    def start(self, request: Request) -> Response:
        """Start the run and show it, or show the form again with all that is wrong."""
        where = form_of(request).get(drafts.WHERE, "").strip()

        def begin(folder: Path, arguments: list[str]) -> None:
            if where:
                self.site.elsewhere.start(folder, arguments, where)
            else:
                processes.start(folder, arguments)

        return self._begin(request, begin, lambda folder: back_to(self.site.places.name(folder)))

    def queue(self, request: Request) -> Response:
        """Let the run wait until no run of the folder trains, or show the form again with all that is wrong."""
        form = form_of(request)
        if form.pop(drafts.WHERE, ""):
            why = "The queue is this machine's. Press Start: a cluster lets a run wait until it has room"
            return self._unusable(request, form, ConfigError(why))
        return self._begin(request, self.site.queue.add, lambda _: RedirectResponse("/runs", 303))

    def _begin(
        self, request: Request, begin: Callable[[Path, list[str]], None], then: Callable[[Path], Response]
    ) -> Response:
        form = form_of(request)
        try:
            draft = self._draft(form, may_run=True)
            draft.read()
            if not draft.errors and draft.verb != "hpo" and ":" in draft.recipe:
                self._check_program(draft)
            if draft.errors:
                return self._page(request, draft, 422, sent="typed")
            folder = draft.folder()
            begin(folder, draft.arguments(folder))
        except HotloopError as error:
            return self._unusable(request, form, error)
        self.site.places.forget()
        return then(folder)

    def _draft(self, form: Mapping[str, str], *, may_run: bool) -> Draft:
        known, clusters = self.site.probe.answer()["components"], self.site.elsewhere.addresses()
        return drafts.of(form, known, self.site.places.root, clusters, may_run=may_run)

    def _check_program(self, draft: Draft) -> None:
        """Let a program's own validators judge its settings, where its file is run anyway."""
        code, _, err = processes.ask([draft.verb, *draft.overrides, "--show"], CHECK_SECONDS)
        if code:
            draft.blame(err.strip()[-4000:] or f"The program ended with exit code {code}")

    def _of_run(self, folder: Path, *, may_run: bool) -> dict[str, str]:
        """Return the form that stands for a run, for the best trial of a search, or for a start that failed.

        Raises:
            ConfigError: there are no settings of it, or they cannot be read.
        """
        file = folder / (BEST if runs.kind_of(folder) == runs.SEARCH else runs.SETTINGS)
        started = processes.arguments_of(folder)
        if file.exists() or not started:
            return self._of_values(conf_files.read(file), may_run=may_run)
        known, where = self.site.elsewhere.addresses(), processes.where_of(folder)
        there = {drafts.WHERE: where} if where in known else {}
        values = self._of_values(configure.compose(started[1:]), may_run=may_run)
        return {**values, "verb": started[0], **there}

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
            elif isinstance(part := compilation.at(values, field.name), dict | list):
                found[field.name] = field.text(part)
        whole = nested.merge({**draft.base}, values)
        for group in _GROUPS:  # a stranger may have written them
            if not isinstance(compilation.at(whole, group), dict):
                raise ConfigError(f"{group}: expected a group of settings")
        if plain.get("kfold.n_splits") is not None:  # else the same settings would hold out other rows
            found["verb"] = "kfold"
        found["mode"], found["inference"] = compilation.mode_of(whole), str(whole["compile"]["inference"])
        for one in compilation.parts(whole, draft.components):
            found |= {f"part.{one.name}.mode": one.training, f"part.{one.name}.inference": one.inference}
            found |= {f"part.{one.name}.on": "on"} if one.on else {}
        return found

    def _page(self, request: Request, draft: Draft, status: int = 200, *, sent: str = "") -> Response:
        probe, base = self.site.probe.answer(), draft.base
        if not draft.changes and not draft.errors:
            draft.read()
        now, missing, not_here = draft.values(), probe["missing"], compilation.not_here(probe["device"])
        if draft.where:  # nobody has asked the cluster yet what it cannot run
            missing, not_here = {}, {}
        return self.site.show(
            request, "training.html.j2", status, draft=draft, sent=sent, recipes=drafts.RECIPES, verbs=drafts.VERBS,
            choices=drafts.choices_of(draft), choice=CHOICE, probe=probe, modes=compilation.modes(missing),
            mode=draft.form.get("mode", compilation.mode_of(now)), usual_mode=compilation.mode_of(base), base=base,
            inference=draft.form.get("inference", base["compile"]["inference"]), parts=self._parts(draft),
            usual={one.name: one for one in compilation.parts(base, draft.components)}, as_above=compilation.AS_ABOVE,
            shown_mode=compilation.mode_of(now), not_here=not_here, kinds=ranges.KINDS,
            searchable=ranges.searchable([*draft.by_name]), new_range=ranges.Row("NUMBER"),
            usual_ranges={one.number: one for one in ranges.of(draft.by_name[ranges.SPACE].default, draft.by_name)},
            only=compilation.ONLY, measured_on=measured.MACHINE, back=_query(draft), **panel(self.site, draft.form),
        )  # fmt: skip

    def _parts(self, draft: Draft) -> list[compilation.Part]:
        """Return the components as they stand in the form."""
        found = []
        for one in compilation.parts(draft.base, draft.components):
            key = f"part.{one.name}"
            if f"{key}.mode" in draft.form:
                mode, inference = draft.form[f"{key}.mode"], draft.form.get(f"{key}.inference", one.inference)
                one = compilation.Part(one.name, f"{key}.on" in draft.form, mode, inference)  # noqa: PLW2901 - as typed
            found.append(one)
        return found

    def _unusable(self, request: Request, asked: Mapping[str, str], error: Exception, status: int = 422) -> Response:
        """Show what is wrong with the recipe, the program or the folder; what was typed goes back with it."""
        kept = {name: value for name, value in asked.items() if name not in ("program", "recipe")}
        return self.site.show(
            request, "unusable.html.j2", status, why=str(error), recipes=drafts.RECIPES, kept=kept,
            recipe=asked.get("recipe", ""), program=asked.get("program", ""),
        )  # fmt: skip


def _dry(draft: Draft) -> list[str]:
    """Return the arguments of a dry run, here or on a cluster."""
    arguments = draft.arguments(draft.folder())
    if draft.where:
        return ["submit", "--dry-run", "--address", draft.where, "--", *arguments]
    return [*arguments, "--dry-run"]


def _query(draft: Draft) -> dict[str, Any]:
    key = "program" if ":" in draft.recipe else "recipe"
    where = {drafts.WHERE: draft.where} if draft.where else {}
    return {key: draft.recipe, **where, **{f"{CHOICE}{group}": name for group, name in draft.choices.items()}}
