"""Lightning's loggers by name. A run's own record has everything, so a logger that fails is left."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, MissingExtraError, describe
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

    def step(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures of a training step, where it is one that is logged."""
        if step % self._every == 0:
            self.log(figures, step)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures."""
        self._do(lambda logger: logger.log_metrics(dict(figures), step=step))

    def close(self, status: str) -> None:
        """Write what is still in memory, and end the run there, by the status that its record has."""
        self._do(lambda logger: logger.finalize(_ENDED[status]))

    def _do(self, act: Callable[[Any], object]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - no viewer is worth the run
                del self._loggers[name]
                self._say(f"run.logger={name} fails ({describe(error)}); the run goes on without it")


def _begun(name: str, start: Start, version: str) -> Any:
    """Return a logger that has begun."""
    if name != "csv" and importlib.util.find_spec(name) is None:
        raise MissingExtraError(f"run.logger={name} needs the package {name}: pip install 'hotloop[{name}]'")
    loggers = require("lightning.pytorch.loggers", "hotloop train")
    folder, run, study = start.folder, start.settings.run, start.within.study
    whole, logs = (start.within.folder or folder).resolve(), folder / FOLDER
    project = run.project or study or Path(start.settings.recipe.name).name
    try:
        if name == "csv":
            return loggers.CSVLogger(folder, FOLDER, version)
        if name == "tensorboard":
            return loggers.TensorBoardLogger(folder, FOLDER, version)
        if name == "mlflow":
            server = run.tracking or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{whole}/mlflow.db"
            logger = loggers.MLFlowLogger(project, run_name=folder.name, tracking_uri=server)
        else:
            logs.mkdir(parents=True, exist_ok=True)
            logger = loggers.WandbLogger(folder.name, logs, project=project, group=study)
        logger.log_hyperparams(configure.to_dict(start.settings))
    except Exception as error:  # each has classes of its own for a server that is away, or nobody logged in
        raise ConfigError(f"run.logger={name} cannot begin: {describe(error)}") from error
    return logger
