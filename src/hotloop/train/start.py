"""Where a run begins: its settings and folder, new or taken up again from a checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, DataError
from hotloop.files import check_folders, guard, too_long, whole
from hotloop.record import DOCUMENT, LINES
from hotloop.report import folds, study
from hotloop.train import checkpoint, conf_files, configure, idle, mirror, program, run_storage
from hotloop.train.kept import Kept
from hotloop.train.nested import leaves
from hotloop.train.schema import Group
from hotloop.train.scope import within
from hotloop.train.settings import GROUP, Settings
from hotloop.train.turn import cannot_write, folder_held
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_log = logging.getLogger("hotloop")
SETTINGS = "settings.yaml"
_CHOICES = ("recipe=workload", "recipe=lightning")
"""What is chosen for a program, beside its name."""
GOAL = "recipe.goal"
FIXED: Mapping[str, tuple[str, ...]] = {
    "it would be another run": ("recipe.name",),
    "a validation was kept as the best by the former": (GOAL,),
    "it would learn from other data, or from another share of them": ("data", "pictures", "kfold", "run.seed"),
    "what is trained, or what it is to learn, would be another": (
        "model", "digits", "language", "diffusion", "focus", "training.freeze_embeddings", "program",
    ),
    "each device has a share of the batches of its own": ("run.devices",),
    "the checkpoint has the state of the former": (
        "training.optimizer", "training.optimizer_options", "training.ema_decay",
    ),
}  # fmt: skip
"""Settings, and groups of them, that a resumed run cannot change, by the reason."""
COMPARED = ("data.path", "data.on_bad_rows", "pictures.path", "pictures.skip_bad", "pictures.min_size")
"""Of these, what may change as long as the data stay the same, which `Start.check_data` compares."""
FREE = (
    *(f"diffusion.{name}" for name in ("output", "sample_every", "sample_steps", "guidance", "prompts", "samples")),
    "diffusion.gradient_checkpointing",
)
"""Of these, what may change anyhow: what is drawn and written of a model, and how much memory its step takes."""
JUDGED = (
    "data.path", "data.on_bad_rows", "pictures.path", "pictures.skip_bad",
    *FREE, GOAL, "run.devices", "training.optimizer", "training.optimizer_options",
)  # fmt: skip
"""Of `FIXED`, what `hotloop eval` and `hotloop predict` may change: it changes neither the model, nor which rows of the
same data are held out."""


@dataclasses.dataclass(frozen=True)
class Start:
    """The settings of a run, its folder, the checkpoint's document that it goes on from, and what it is part of.

    ``open`` holds the folder's lock, from the first reading or writing there on; whoever trains closes it. ``dry``: all
    is checked that can be before training, and nothing is trained or written. ``leads``: it is the first of the
    processes that train together, which alone writes. ``anew``: an earlier start of the run has left no checkpoint.
    """

    settings: Settings
    folder: Path
    resume: dict[str, Any] | None = None
    within: Within = dataclasses.field(default_factory=Within)
    dry: bool = False
    leads: bool = True
    anew: bool = False
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
    def kept(self) -> Kept:
        """The copy of the folder at ``run.storage``, to which only a process that writes the run sends."""
        writes = self.leads and not self.dry
        return Kept(mirror.of(self.settings.run.storage, self.folder, self.within.folder) if writes else None)

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
    try:
        folder.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(f"run.folder: {too_long(error)}") from error
    if (folder / study.DOCUMENT).exists():
        raise ConfigError(f"run.folder={folder} holds a study, whose report would be overwritten: name another folder")
    if any((folder / name).exists() for name in (LINES, DOCUMENT, folds.DOCUMENT, checkpoint.FOLDER)):
        raise ConfigError(
            f"run.folder={folder} holds a run already: go on with it by run.resume={folder}, or name another folder "
            "(or delete this one, if nothing was saved in it yet)"
        )
    run_storage.check_new(settings.run.storage, folder)
    return folder


def take_up(settings: Settings, folder: Path, within: Within) -> Start:
    """Begin a run that is part of something larger, or go on with it from its last checkpoint where it has one.

    What is stored of it comes first where that is newer.

    Raises:
        ConfigError: the checkpoint, or what another machine has stored of the run, cannot be read.
    """
    last = folder / checkpoint.FOLDER / checkpoint.LAST
    stored = mirror.of(settings.run.storage, folder, within.folder)
    if stored:
        try:
            stored.take()
        except mirror.StorageError as error:
            raise ConfigError(f"{mirror.SETTING}: {error}") from error
    guard(within.folder or folder)
    _check_folder_of_checkpoints(folder)
    run = {"folder": str(folder), "resume": str(folder) if last.is_file() else None}
    document = checkpoint.load(last) if last.is_file() else None
    if document:
        checkpoint.check_resumable(last, document)
    return Start(_with_run(settings, **run), folder, document, within)


def _resume(given: Path, overrides: Sequence[str]) -> Start:
    """Take up a run by its folder, or by one of its checkpoints; one that has none yet begins with its first step."""
    # A recipe may be named as it was for the new run.
    given_ = [one for one in configure.with_data(overrides) if not is_about_folder(one)]
    named = [text for one in given_ for text in configure.own_program(one)]
    changed = [re.sub(r"^recipe=", "recipe.name=", one) for one in named if one not in _CHOICES]
    folder, held = given.parent.parent if given.is_file() else given, contextlib.ExitStack()
    if folder.is_dir():  # first, since another process that trains there would write a newer checkpoint
        held.enter_context(folder_held(folder))
        _check_folder_of_checkpoints(folder)
    found = _died_early(given, changed) or _from_checkpoint(given, changed)
    run_storage.check_resumed(found.settings.run.storage, found.folder)
    return dataclasses.replace(found, open=held)


def _from_checkpoint(given: Path, changed: Sequence[str]) -> Start:
    path = given if given.is_file() else checkpoint.find(given, checkpoint.LAST, checkpoint.BEST)
    folder = path.parent.parent
    document = checkpoint.load(path)
    checkpoint.check_resumable(path, document)
    before = configure.from_dict(document["settings"])
    with program.as_trained(before.recipe.name):
        before = program.filled(before)
    _check_recipe(folder, path, before)
    now = program.filled(configure.from_dict(document["settings"], changed))
    for why, names in FIXED.items():
        for name in names:
            if name == GOAL and not document["position"]["best"]:
                continue  # nothing was judged by it
            if what := ", ".join(_changes(before, now, name, (*COMPARED, *FREE))):
                raise ConfigError(
                    f"{name} cannot change while a run is resumed ({what}): {why}. Start a new run instead "
                    "(docs/reference/settings.md lists what may change)"
                )
    _check_end(folder, document["position"], before, now)
    return Start(_with_run(now, folder=str(folder), resume=str(given)), folder, document)


def settings_to_judge(document: Mapping[str, Any], changed: Sequence[str], also: Sequence[str] = ()) -> Settings:
    """Return the settings of a checkpoint that is judged, with changed ones.

    Args:
        document: the checkpoint's.
        changed: overrides.
        also: what may change beside `JUDGED`.

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
        # Text may name data, which lie elsewhere now.
        text = {name: value for name, value in (now.program or {}).items() if isinstance(value, str)}
        before = before.model_copy(update={GROUP: {**(before.program or {}), **text}})
    fixed = (name for names in FIXED.values() for name in names)
    if what := ", ".join(one for name in fixed for one in _changes(before, now, name, (*JUDGED, *also))):
        raise ConfigError(
            f"{what}: cannot change, as it would be another model than the run's, or judged on rows that it was "
            f"trained on. Leave it out; {', '.join([*also, 'data.path'])}, training.eval_batch_size, and the device "
            "and precision of run may change (docs/reference/settings.md, When a run is resumed)"
        )
    return now


def _check_end(folder: Path, at: Mapping[str, Any], before: Settings, now: Settings) -> None:
    """Refuse to go on behind an end that the run is newly given.

    A run that is just at its end is no error: it may have been killed before it said that it was finished. An old end
    is not looked at: where nobody knows how long an epoch is, ``training.max_steps`` alone ends a run.

    Raises:
        ConfigError: the run is past it.
    """
    training, old, step, epochs = now.training, before.training, at["step"], at["epoch"]
    within = at["step_in_epoch"] > 0
    where = f"it has done {step:,} steps, " + (f"and is in epoch {epochs + 1}" if within else f"{epochs} epochs")
    if training.num_epochs != old.num_epochs and epochs + within > training.num_epochs:
        name, value, more = "num_epochs", training.num_epochs, epochs + 1
    elif training.max_steps not in (None, old.max_steps) and step > training.max_steps:
        name, value, more = "max_steps", training.max_steps, step + 1
    else:
        return
    raise ConfigError(
        f"training.{name}={value}: run {folder} is past that, {where}. Set training.{name}={more} or more to go on "
        "with it, or start a new run without run.resume"
    )


def _check_recipe(folder: Path, path: Path, settings: Settings) -> None:
    """Refuse a checkpoint that was put into the folder of a run of another recipe: one record would hold both."""
    if not (folder / SETTINGS).is_file():
        return
    try:
        there = dict(leaves(conf_files.read(folder / SETTINGS, of_run=True))).get("recipe.name")
    except ConfigError as error:
        _log.warning("%s. The settings in %s are used, and written there anew.", error, path)
        return
    if there != settings.recipe.name:
        raise ConfigError(
            f"checkpoint {path} is of recipe={settings.recipe.name}, and run {folder} of recipe={there}: put it back "
            "into the folder that it is from"
        )


def _died_early(folder: Path, changed: Sequence[str]) -> Start | None:
    """Begin a run again that left its settings and no checkpoint; None where that is not so."""
    if not (folder / SETTINGS).is_file() or any((folder / checkpoint.FOLDER).glob("*.pt")):
        return None
    conf_files.read(folder / SETTINGS, of_run=True)  # of a torn file the rest would come from the defaults
    settings = program.filled(configure.load(changed, folder / SETTINGS))
    return Start(_with_run(settings, folder=str(folder)), folder, anew=True)


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


def _changes(before: Settings, now: Settings, name: str, free: Sequence[str]) -> Iterator[str]:
    """Say what of a setting, or of a group of them, is no longer as it was and has to be; ``free`` has not."""
    old, new = (_at(one, name) for one in (before, now))
    if within(name, free):
        return
    if isinstance(old, Group):
        for field in type(old).model_fields:
            yield from _changes(before, now, f"{name}.{field}", free)
    elif name == GROUP:
        yield from (
            f"{name}.{one}={(old or {}).get(one)!r} to {value!r}"
            for one, value in (new or {}).items()
            if (old or {}).get(one) != value
        )
    elif old != new:
        yield f"{name}={old!r} to {new!r}"


def _at(settings: Settings, name: str) -> Any:
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


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
            file.write(f"{conf_files.BEGIN}\n{configure.to_yaml(again)}{conf_files.END}\n".encode())
        for name, text in (files or {}).items():
            with whole(start.folder / name, durable=False) as file:
                file.write(text.encode())
    except OSError as error:
        raise cannot_write(start.folder, error) from error
