"""Lightning's loggers by name. A run's own record has everything, so a logger that fails is left."""

from __future__ import annotations

import importlib.util
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, HotloopError, MissingExtraError
from hotloop.files import read, whole
from hotloop.train import configure
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.record import RunRecord
    from hotloop.train.start import Start

FOLDER = "logs"
_ENDED = {"finished": "success", "failed": "failed", "interrupted": "KILLED", "pruned": "KILLED"}
"""How a run ended, in the words of Lightning's loggers."""


class Tracking:
    """The loggers of ``run.logger``.

    Args:
        start: the run's settings, folder, and what it is within.
        record: the run's; each start of a run gets a version of its own in files.
        say: prints a line.

    Raises:
        ConfigError: a logger refuses to begin: no server, nobody logged in.
        MissingExtraError: its package is not installed.
    """

    def __init__(self, start: Start, record: RunRecord, say: Callable[[str], None]) -> None:
        self._say, self._every = say, start.settings.run.log_every
        version = f"start-{record.document['starts']}"
        names = start.settings.run.loggers if start.leads else ()
        self._loggers = {name: _begun(name, start, version) for name in names}
        self._known: dict[str, float] = {}

    def step(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures of a training step, where it is one that is logged."""
        if step % self._every == 0:
            self.log(figures, step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures."""
        self._do(lambda logger: logger.log_metrics(dict(figures), step=step))

    def compiled(self, components: Mapping[str, Mapping[str, Any]], figures: Mapping[str, Any], step: int) -> None:
        """Log the cost and the gain of compiling, where they have changed.

        Args:
            components: each component's status as plain data.
            figures: ``seconds_saved``, ``speed_up`` and the like, None where not known.
            step: of the run.
        """
        known = {name: float(value) for name, value in figures.items() if value is not None}
        for name in ("recompiles", "compile_seconds"):
            known[name] = float(sum(one.get(name, 0) for one in components.values()))
        if known != self._known:
            self._known = known
            self.log(known, step)

    def close(self, status: str) -> None:
        """Write what is still in memory, and end the run there, by the status that its record has."""
        self._do(lambda logger: logger.finalize(_ENDED[status]))

    def _do(self, act: Callable[[Any], object]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - no viewer is worth the run
                del self._loggers[name]
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                self._say(f"run.logger={name} fails ({why}); the run goes on without it")


def _begun(name: str, start: Start, version: str) -> Any:
    """Return a logger that has begun."""
    if name != "csv" and importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"run.logger={name} needs the package {name}: pip install 'hotloop[{name}]'")
    loggers = require("lightning.pytorch.loggers", "hotloop train")
    make = {"csv": loggers.CSVLogger, "tensorboard": loggers.TensorBoardLogger}
    try:
        if name in make:
            return make[name](start.folder, FOLDER, version)
        logger = _mlflow(loggers, start) if name == "mlflow" else _wandb(loggers, start)
        logger.log_hyperparams(configure.to_dict(start.settings))
    except HotloopError:
        raise
    except Exception as error:  # each has classes of its own for a server that is away, or nobody logged in
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"run.logger={name} cannot begin: {type(error).__name__}: {text}. Mend it, or choose another run.logger"
        ) from error
    return logger


def _mlflow(loggers: Any, start: Start) -> Any:
    whole_folder = (start.within.folder or start.folder).resolve()
    run = start.settings.run
    logger = loggers.MLFlowLogger(
        experiment_name=run.project or start.within.study or start.settings.recipe.name,
        run_name=_name(start),
        tracking_uri=run.tracking or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{whole_folder}/mlflow.db",
        run_id=_identity(start, "mlflow-run"),
    )
    _keep(start, "mlflow-run", str(logger.run_id))
    return logger


def _wandb(loggers: Any, start: Start) -> Any:
    """Open the run in the group of its study; ``WANDB_MODE=offline`` keeps it in the run's folder."""
    identity = _identity(start, "wandb-run") or uuid.uuid4().hex[:12]
    (start.folder / FOLDER).mkdir(parents=True, exist_ok=True)
    logger = loggers.WandbLogger(
        name=_name(start),
        save_dir=start.folder / FOLDER,
        id=identity,
        project=start.settings.run.project or f"hotloop-{Path(start.settings.recipe.name).stem}",
        group=start.within.study,
        resume="allow",
    )
    _keep(start, "wandb-run", identity)
    return logger


def _name(start: Start) -> str:
    levels = start.within.levels(start.folder.name)
    return "/".join(name for _, name in levels[1:] or levels)


def _identity(start: Start, name: str) -> str | None:
    kept = start.folder / FOLDER / name
    return read(kept).decode() if kept.is_file() else None


def _keep(start: Start, name: str, identity: str) -> None:
    """Keep the run's name there, so that it is the same one when it goes on."""
    with whole(start.folder / FOLDER / name, durable=False) as file:
        file.write(identity.encode())
