"""Other viewers of a run: Lightning's loggers by name, with runs nested as study, trial and fold.

A run's own record has everything in any case. So a logger that fails is said once and left, and the run goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import queue
import threading
import time
import uuid
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, MissingExtraError
from hotloop.files import read, whole
from hotloop.train import configure
from hotloop.train.optional import require
from hotloop.train.turn import turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hotloop.record import RunRecord
    from hotloop.train.interrupt import Interrupt
    from hotloop.train.start import Start
    from hotloop.train.within import Within

FOLDER = "logs"
_PARENT, _NAME = "mlflow.parentRunId", "mlflow.runName"
_PLACE, _STORE = "hotloop.folder", "MLFLOW_TRACKING_URI"
_WAITING = 10_000
"""How much may wait for a slow viewer; a run that logs faster than that waits as well."""
_PATIENCE_SECONDS = 5.0
"""How long a run that ends waits for its viewers without a word, and one that was interrupted at all."""
_OPENED_SECONDS = 300
"""How long a run waits while others open a store: its tables may be made first, on a slow disk."""
_ENDED = {
    "finished": ("success", 0),
    "failed": ("failed", 1),
    "interrupted": ("KILLED", 130),
    "pruned": ("KILLED", 130),
}
"""How a run ended, in the words of Lightning's loggers (what it does not know is MLflow's own), and as an exit code."""


@dataclasses.dataclass
class _Viewer:
    """A logger that was begun, by its name; one that has failed is given nothing more."""

    name: str
    logger: Any
    failed: bool = False


class Tracking:
    """Passes a run's figures on to the loggers of ``run.logger``, in a thread of its own: none holds up a step.

    Args:
        start: the run's settings, folder, and what it is within.
        record: the run's; each start of a run gets a version of its own in files.
        say: prints a line.
        interrupt: a wish to stop ends the waiting for a viewer.

    Raises:
        ConfigError: a logger refuses to begin: no server, nobody logged in.
        MissingExtraError: its package is not installed.
    """

    def __init__(self, start: Start, record: RunRecord, say: Callable[[str], None], interrupt: Interrupt) -> None:
        self._say, self._every, self._interrupt = say, start.settings.run.log_every, interrupt
        self._compiled: dict[str, Any] = {}
        self._waiting: queue.Queue[Callable[[_Viewer], None] | None] = queue.Queue(_WAITING)
        self._steps, self._seconds = 0, 0.0
        self._viewers: list[_Viewer] = []
        version = f"start-{record.document['starts']}"
        try:
            for name in start.settings.run.loggers if start.leads else ():
                self._viewers.append(_Viewer(name, _begun(name, start, version)))
        except BaseException:
            self._pass_on_all([lambda one: one.logger.finalize("failed")])
            raise
        self._thread = threading.Thread(target=self._pass_on, name="hotloop-loggers", daemon=True)
        if self._viewers:
            self._thread.start()

    def step(self, figures: Mapping[str, float], step: int) -> None:
        """Pass figures of a training step on, where it is one that is logged."""
        if not self._viewers:
            return
        began = time.perf_counter()
        if step % self._every == 0:
            self.log(figures, step)
        self._steps += 1
        self._seconds += time.perf_counter() - began

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Pass figures on."""
        known = dict(figures)
        self._do(lambda one: one.logger.log_metrics(known, step=step))

    def compiled(self, components: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any], step: int) -> None:
        """Pass on what runs, and what compiling cost and saved, where that has changed.

        Args:
            components: each component's status as plain data.
            figures: ``seconds_saved``, ``speed_up`` and the like, None where not known.
            step: of the run.
        """
        known = {
            "recompiles": float(sum(one.get("recompiles", 0) for one in components.values())),
            "compile_seconds": float(sum(one.get("compile_seconds", 0.0) for one in components.values())),
            **{name: float(value) for name, value in figures.items() if value is not None},
        }
        running = ", ".join(f"{name} {one['running']}" for name, one in components.items())
        now = {"running": running, **known}
        if now == self._compiled:
            return
        self._compiled = now
        self.log(known, step)
        self._do(lambda one: _tell_running(one.name, one.logger, running, step))

    def cost(self) -> dict[str, float]:
        """Return the milliseconds that logging has cost the run's thread a step; empty where nothing is logged."""
        return {"logging_step_ms": 1000 * self._seconds / self._steps} if self._steps else {}

    def close(self, status: str) -> None:
        """Write what is still in memory, and end the run there; an interrupted run leaves a viewer that takes long.

        Args:
            status: how it ended, as its record has it.
        """
        word, code = _ENDED[status]

        def end(one: _Viewer) -> None:
            if one.name == "wandb":
                one.logger.experiment.summary.update({"status": status})
            one.logger.finalize(word)
            if one.name == "wandb":
                one.logger.experiment.finish(exit_code=code, quiet=True)

        self._do(end)
        self._do(None)
        names, told = ", ".join(one.name for one in self._viewers if not one.failed), False
        while self._thread.is_alive():
            self._thread.join(_PATIENCE_SECONDS)
            if not self._thread.is_alive():
                return
            if self._interrupt.signal:
                self._say(f"run.logger={names} is slow, and left: it lacks the newest figures, the record has all")
                return
            if not told:
                self._say(f"The run is over; run.logger={names} still takes its figures, Ctrl-C leaves the rest")
            told = True

    def _do(self, act: Callable[[_Viewer], None] | None) -> None:
        """Put what is to be done behind what waits; where too much waits, a wish to stop ends the waiting."""
        while self._thread.is_alive():
            try:
                self._waiting.put(act, timeout=1)
            except queue.Full:
                if not self._interrupt.signal:
                    continue
            return

    def _pass_on(self) -> None:
        """Pass on what waits, until the run has ended."""
        self._pass_on_all(iter(self._waiting.get, None))

    def _pass_on_all(self, acts: Iterable[Callable[[_Viewer], None]]) -> None:
        for act in acts:
            for one in self._viewers:
                if one.failed:
                    continue
                try:
                    act(one)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - no viewer is worth the run, nor this thread
                    one.failed = True
                    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                    self._say(f"run.logger={one.name} fails ({why}); the run goes on without it")


def _begun(name: str, start: Start, version: str) -> Any:
    """Return a logger that has begun.

    Raises:
        ConfigError: it refuses.
        MissingExtraError: its package is not installed.
    """
    make = {"csv": _csv, "tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[name]
    try:
        return make(start, version)
    except (MissingExtraError, ConfigError):
        raise
    except Exception as error:  # each has classes of its own for a server that is away, or nobody logged in
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"run.logger={name} cannot begin: {type(error).__name__}: {text}. Mend it, or choose another run.logger"
        ) from error


def _tell_running(name: str, logger: Any, running: str, step: int) -> None:
    """Say in words what runs, in the way that each viewer has for words."""
    if name == "csv":
        logger.log_metrics({"running": running}, step=step)
    elif name == "tensorboard":
        logger.experiment.add_text("running", running, global_step=step)
    elif name == "mlflow":
        logger.experiment.set_tag(logger.run_id, "hotloop.running", running)
    else:
        logger.experiment.summary["running"] = running


def _csv(start: Start, version: str) -> Any:
    return require("lightning.fabric.loggers", "hotloop train").CSVLogger(start.folder, FOLDER, version)


def _tensorboard(start: Start, version: str) -> Any:
    _installed("tensorboard")
    return require("lightning.fabric.loggers", "hotloop train").TensorBoardLogger(start.folder, FOLDER, version)


def _mlflow(start: Start, version: str) -> Any:  # noqa: ARG001 - a run that goes on is the same one there
    """Open the run where it belongs: below its trial, and that below its study, each a run of MLflow's own."""
    _installed("mlflow")
    kept, within = start.folder / FOLDER / "mlflow-run", start.within
    whole = (within.folder or start.folder).resolve()
    address = start.settings.run.tracking or os.environ.get(_STORE) or f"sqlite:///{whole}/mlflow.db"
    levels = within.levels(start.folder.name)
    experiment = start.settings.run.project or within.study or start.settings.recipe.name
    # A store that is new is given its tables by whoever opens it: by one, and not by every worker at once.
    with turn(whole / "mlflow.turn", _OPENED_SECONDS), _environment_kept():
        logger = require("lightning.pytorch.loggers", "hotloop train").MLFlowLogger(
            experiment_name=experiment,
            run_name="/".join(name for _, name in levels[1:] or levels),
            tracking_uri=address,
            run_id=read(kept).decode() if kept.is_file() else None,
        )
        logger.tags = {f"hotloop.{kind}": name for kind, name in levels} | {_PLACE: str(whole)}
        if not kept.is_file() and len(levels) > 1:
            logger.tags[_PARENT] = _parent(address, experiment, levels[:-1], whole)
        if not kept.is_file():  # MLflow takes a run's settings once; those of a resumed one are in its folder
            logger.log_hyperparams(configure.to_dict(start.settings))
        _keep(kept, logger.run_id)
    return logger


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Put the variable back by which MLflow hands its store on: the next run of this process may have another one."""
    before = os.environ.get(_STORE)
    try:
        yield
    finally:
        os.environ.pop(_STORE, None)
        if before is not None:
            os.environ[_STORE] = before


def _parent(address: str, experiment: str, levels: Sequence[tuple[str, str]], whole: Path) -> str:
    """Return MLflow's run that stands for a study or a trial, made where there is none; several workers may ask.

    The study's folder is part of what it is: on a server, studies of one name are often several.
    """
    client = require("mlflow.tracking", "run.logger=mlflow", "mlflow").MlflowClient(address)
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else client.create_experiment(experiment)
    tags = {f"hotloop.{kind}": name for kind, name in levels} | {"hotloop.level": levels[-1][0], _PLACE: str(whole)}

    def known() -> list[Any]:
        runs = client.search_runs([place], f"tags.`hotloop.level` = '{levels[-1][0]}'", max_results=5000)
        same = [run for run in runs if all(run.data.tags.get(key) == value for key, value in tags.items())]
        return sorted(same, key=lambda run: (run.info.start_time, run.info.run_id))

    if not known():
        above = {_PARENT: _parent(address, experiment, levels[:-1], whole)} if len(levels) > 1 else {}
        made = client.create_run(place, tags={**tags, **above, _NAME: levels[-1][1]}).info.run_id
        client.set_terminated(made)
        if known()[0].info.run_id != made:  # another worker was a moment sooner
            client.delete_run(made)
    return str(known()[0].info.run_id)


def _wandb(start: Start, version: str) -> Any:  # noqa: ARG001 - a run that goes on is the same one there
    """Open the run in the group of its study; without a login, ``WANDB_MODE=offline`` keeps it in the run's folder."""
    _installed("wandb")
    wandb = require("wandb", "run.logger=wandb", "wandb")
    kept, within = start.folder / FOLDER / "wandb-run", start.within
    levels = within.levels(start.folder.name)
    identity = read(kept).decode() if kept.is_file() else uuid.uuid4().hex[:12]
    logger = require("lightning.pytorch.loggers", "hotloop train").WandbLogger(
        name="/".join(name for _, name in levels[1:] or levels),
        save_dir=start.folder / FOLDER,
        id=identity,
        project=start.settings.run.project or f"hotloop-{Path(start.settings.recipe.name).stem}",
        group=_group(within),
        job_type=levels[-1][0],
        resume="allow",
        settings=wandb.Settings(console="off", silent=True),
    )
    (start.folder / FOLDER).mkdir(parents=True, exist_ok=True)
    logger.log_hyperparams(configure.to_dict(start.settings))
    _keep(kept, identity)
    return logger


def _group(within: Within) -> str | None:
    """Return the group of a study's runs: its name, and what tells its folder from that of another one of this name."""
    if within.study is None or within.folder is None:
        return within.study
    return f"{within.study} {zlib.crc32(str(within.folder.resolve()).encode()):08x}"


def _installed(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(f"run.logger={package} needs the package {package}: pip install 'hotloop[{package}]'")


def _keep(path: Path, identity: str) -> None:
    """Keep what a run is called there, so that it is the same one when it goes on."""
    with whole(path, durable=False) as file:
        file.write(identity.encode())
