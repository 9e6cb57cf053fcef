"""Where a run begins: its settings and folder, new or taken up again from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, DataError
from hotloop.files import check_folders, guard, whole
from hotloop.record import DOCUMENT, LINES
from hotloop.report import folds, study
from hotloop.train import checkpoint, conf_files, configure, idle, program, storage
from hotloop.train.nested import leaves
from hotloop.train.scope import within
from hotloop.train.settings import GROUP, Settings
from hotloop.train.turn import cannot_write, folder_held
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger("hotloop")
SETTINGS = "settings.yaml"
GOAL = "recipe.goal"
FIXED = (
    "recipe.name", GOAL, "data", "pictures", "kfold", "run.seed", "model", "diffusion", "focus", "program",
    "run.devices", "training.freeze_embeddings", "training.optimizer", "training.optimizer_options",
    "training.ema_decay",
)  # fmt: skip
"""Settings, and groups of them, that a resumed run cannot change."""
COMPARED = ("data.path", "data.on_bad_rows", "pictures.path", "pictures.skip_bad", "pictures.min_size")
"""Of these, the settings that may change as long as the data stay the same, which `Start.check_data` compares."""
FREE = (
    "diffusion.output", "diffusion.sample_every", "diffusion.sample_steps", "diffusion.guidance", "diffusion.prompts",
    "diffusion.samples", "diffusion.gradient_checkpointing",
)  # fmt: skip
"""Of these, the settings that may change anyhow."""
JUDGED = (*COMPARED[:4], *FREE, GOAL, "run.devices", "training.optimizer", "training.optimizer_options")
"""Of `FIXED`, the settings that `hotloop eval` may change."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The settings of a run, its folder, the checkpoint's document that it goes on from, and what it is part of.

    ``open`` holds the folder's lock, from the first reading or writing there on; whoever trains closes it. ``dry``: all
    is checked that can be before training, and nothing is trained or written. ``leads``: it is the first of the
    processes that train together, which alone writes.
    """

    settings: Settings
    folder: Path
    resume: dict[str, Any] | None = None
    within: Within = dataclasses.field(default_factory=Within)
    dry: bool = False
    leads: bool = True
    open: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack, compare=False, repr=False)

    def __post_init__(self) -> None:
        guard(self.within.folder or self.folder)

    @property
    def resumed(self) -> Path | None:
        """The file of the checkpoint that the run goes on from."""
        if self.resume is None:
            return None
        given = Path(self.settings.run.resume or self.folder)
        return given if given.is_file() else checkpoint.find(given, checkpoint.LAST, checkpoint.BEST)

    @functools.cached_property
    def copy(self) -> storage.Copy | None:
        """The copy of the folder at ``run.storage``, to which only a process that writes the run sends."""
        writes = self.leads and not self.dry
        return storage.of(self.settings.run.storage, self.folder, self.within.folder) if writes else None

    def check_data(self, fingerprint: str) -> None:
        """Refuse to go on with other data than before.

        Raises:
            DataError: the pairs, or their split, are not the same.
        """
        if self.resume and self.resume["data"] != fingerprint:
            raise DataError(
                f"run {self.folder} was trained on other data than its settings give now: put the data back as it was, "
                "or start a new run without run.resume"
            )


def prepare(overrides: Sequence[str] = (), config: str | Path | None = None) -> Start:
    """Compose the settings and choose the folder, which is not made yet.

    Raises:
        ConfigError: settings that cannot be used or would do nothing, a folder that holds another run, or nothing to
            resume from.
    """
    if resumed := configure.resumed(overrides, config):
        if config:
            raise ConfigError(f"--config {config} does not go with run.resume: a resumed run keeps its own settings")
        return _resume(resumed, overrides)
    settings = program.filled(configure.load(overrides, config))
    idle.refuse_idle(settings)  # of a new run alone: those of a resumed one cannot be taken back
    return Start(settings, new_folder(settings))


def new_folder(settings: Settings) -> Path:
    """Choose the folder of what begins, a run or a cross-validation.

    Raises:
        ConfigError: it holds another one.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    named = conf_files.folder_name(settings.recipe.name)
    folder = Path(settings.run.folder) if settings.run.folder else _unused(Path("runs", named, stamp))
    folder = folder.resolve() if ".." in folder.parts else folder  # what is before it need not be there
    if (folder / study.DOCUMENT).exists():
        raise ConfigError(f"run.folder={folder} holds a study, whose report would be overwritten: name another folder")
    if any((folder / name).exists() for name in (LINES, DOCUMENT, folds.DOCUMENT, checkpoint.FOLDER)):
        raise ConfigError(
            f"run.folder={folder} holds a run already: go on with it by run.resume={folder}, or name another folder "
            "(or delete this one, if nothing was saved in it yet)"
        )
    storage.check(settings.run.storage, folder)
    return folder


def take_up(settings: Settings, folder: Path, within: Within) -> Start:
    """Begin a run that is part of something larger, or go on with it from its last checkpoint where it has one.

    What is stored of it comes first where that is newer.

    Raises:
        ConfigError: the checkpoint, or what another machine has stored of the run, cannot be read.
    """
    last = folder / checkpoint.FOLDER / checkpoint.LAST
    stored = storage.of(settings.run.storage, folder, within.folder)
    if stored:
        try:
            stored.pull()
        except storage.StorageError as error:
            raise ConfigError(f"{storage.SETTING}: {error}") from error
    guard(within.folder or folder)
    _check_folder_of_checkpoints(folder)
    run = {"folder": str(folder), "resume": str(folder) if last.is_file() else None}
    document = checkpoint.load(last) if last.is_file() else None
    return Start(_with_run(settings, **run), folder, document, within)


def _resume(given: Path, overrides: Sequence[str]) -> Start:
    """Take up a run by its folder, or by one of its checkpoints; one that has none yet begins with its first step."""
    # A recipe may be named as it was for the new run.
    given_ = [one for one in overrides if not is_about_folder(one)]
    named = [text for one in given_ for text in configure.own_program(one)]
    changed = [re.sub(r"^recipe=", "recipe.name=", one) for one in named if one != "recipe=workload"]
    folder, held = given.parent.parent if given.is_file() else given, contextlib.ExitStack()
    if folder.is_dir():  # first, since another process that trains there would write a newer checkpoint
        held.enter_context(folder_held(folder))
        _check_folder_of_checkpoints(folder)
    found = _died_early(given, changed) or _from_checkpoint(given, changed)
    return dataclasses.replace(found, open=held)


def _from_checkpoint(given: Path, changed: Sequence[str]) -> Start:
    path = given if given.is_file() else checkpoint.find(given, checkpoint.LAST, checkpoint.BEST)
    folder, document = path.parent.parent, checkpoint.load(path)
    before = configure.from_dict(document["settings"])
    with program.as_trained(before.recipe.name):
        before = program.filled(before)
    now = program.filled(configure.from_dict(document["settings"], changed))
    judged = document["position"]["best"]  # else nothing was judged by the goal
    if wrong := _changes(before, now, (*COMPARED, *FREE, *([] if judged else [GOAL]))):
        raise ConfigError(f"{', '.join(wrong)}: cannot change while a run is resumed. Start a new run instead")
    return Start(_with_run(now, folder=str(folder), resume=str(given)), folder, document)


def settings_to_judge(document: Mapping[str, Any], changed: Sequence[str]) -> Settings:
    """Return the settings of a checkpoint that is judged, with changed ones.

    Raises:
        ConfigError: it would be another model, or judged on rows that it was trained on.
    """
    before = configure.from_dict(document["settings"])
    if not changed:
        return before
    now = configure.from_dict(document["settings"], changed)
    if ":" in now.recipe.name and now.recipe.name == before.recipe.name:
        with program.as_trained(now.recipe.name):
            own = program.known(now.recipe.name)
            before = before.model_copy(update={GROUP: own.filled(before.program)})
        now = now.model_copy(update={GROUP: own.filled(now.program)})
    text = [f"{GROUP}.{name}" for name, value in now.program.items() if isinstance(value, str)]  # it may name data
    if wrong := _changes(before, now, (*JUDGED, *text)):
        raise ConfigError(
            f"{', '.join(wrong)}: cannot change, as it would be another model than the run's, or judged on rows that "
            "it was trained on. Leave it out"
        )
    return now


def _died_early(folder: Path, changed: Sequence[str]) -> Start | None:
    """Begin a run again that left its settings and no checkpoint; None where that is not so."""
    if not (folder / SETTINGS).is_file() or any((folder / checkpoint.FOLDER).glob("*.pt")):
        return None
    settings = program.filled(configure.load(changed, folder / SETTINGS))
    return Start(_with_run(settings, folder=str(folder)), folder)


def _check_folder_of_checkpoints(folder: Path) -> None:
    """Refuse a run whose checkpoints would be written elsewhere, before it trains: a full disk would be waited for."""
    try:
        check_folders(folder / checkpoint.FOLDER / checkpoint.LAST)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _with_run(settings: Settings, **run: str | None) -> Settings:
    return settings.model_copy(update={"run": settings.run.model_copy(update=run)})


def is_about_folder(override: str) -> bool:
    """Say whether an override is of the folder: what a resumed run was told of it is its own affair."""
    return override.lstrip("+").startswith(("run.resume=", "run.folder="))


def _changes(before: Settings, now: Settings, free: Sequence[str]) -> list[str]:
    """List the settings of `FIXED` that have changed and are not ``free``, each with its change."""
    old, new = (dict(leaves(configure.to_dict(one))) for one in (before, now))
    changed = [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]
    wrong = [name for name in changed if within(name, FIXED) and not within(name, free)]
    return [f"{name}={old.get(name)!r} to {new.get(name)!r}" for name in wrong]


def _unused(folder: Path) -> Path:
    """Return the folder's name, with a number behind it where two runs begin in one second."""
    names = [folder, *(folder.with_name(f"{folder.name}-{number}") for number in range(2, 1000))]
    return next(one for one in names if not one.exists())


def write_settings(start: Start, files: Mapping[str, str] | None = None) -> None:
    """Write the run's settings into its folder, in a form that ``--config`` takes to run it again, and its ``files``.

    Raises:
        ConfigError: another process trains there, or the folder cannot be written.
    """
    if start.dry or not start.leads:
        return
    start.open.enter_context(folder_held(start.folder))
    _check_folder_of_checkpoints(start.folder)
    again = _with_run(start.settings, folder=None, resume=None)
    try:
        with whole(start.folder / SETTINGS) as file:
            file.write(configure.to_yaml(again).encode())
        for name, text in (files or {}).items():
            with whole(start.folder / name, durable=False) as file:
                file.write(text.encode())
    except OSError as error:
        raise cannot_write(start.folder, error) from error
