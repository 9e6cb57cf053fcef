"""A Ray cluster that runs workers as tasks: Ray decides where, and the command starts a lost one again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train.optional import require
from hotloop.train.workers import Ended, called, ended

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.settings import Settings

_PROBE_SECONDS = 5.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Args:
        ray: the module.
        settings: of a run.
        nodes: the resources of each node that is alive.
    """

    ray: Any
    settings: Settings
    nodes: tuple[Mapping[str, float], ...]

    @property
    def needs(self) -> dict[str, float]:
        """The ``num_cpus`` and ``num_gpus`` that a worker takes of a node."""
        engine, run = self.settings.engine, self.settings.run
        elsewhere = run.accelerator in ("cpu", "mps") or run.device.partition(":")[0] in ("cpu", "mps")
        named = run.accelerator == "cuda" or run.device.startswith("cuda")
        usual = run.devices if named or (any(one.get("GPU") for one in self.nodes) and not elsewhere) else 0
        return {"num_cpus": engine.num_cpus, "num_gpus": usual if engine.num_gpus is None else engine.num_gpus}

    @property
    def room(self) -> int:
        """How many workers the cluster has room for while nobody else uses it."""
        wanted = {"CPU": self.needs["num_cpus"], "GPU": self.needs["num_gpus"]}
        usual = os.cpu_count() or 1
        fit = ([int(one.get(kind, 0) / need + 1e-9) for kind, need in wanted.items() if need] for one in self.nodes)
        return sum(min(each, default=usual) for each in fit)


@contextlib.contextmanager
def connected(settings: Settings, setting: str) -> Iterator[Cluster]:
    """Connect to the cluster of ``engine.address`` while the block runs.

    Raises:
        ConfigError: nobody answers there, it has another version of Ray or Python, or no node has room for a worker.
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", f"{setting}=ray", "ray")
    address = settings.engine.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        if address != "auto":  # Ray itself would wait for minutes
            name, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((name.strip("[]"), int(port)), _PROBE_SECONDS).close()
        ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"engine.address={address}: {' '.join(str(error).split())[:400] or type(error).__name__}. Start Ray there "
            f"by `ray start --head`, correct engine.address, or leave {setting} out"
        ) from error
    try:
        cluster = Cluster(ray, settings, tuple(one["Resources"] for one in ray.nodes() if one["Alive"]))
        if not cluster.room:
            needs = ", ".join(f"{name}={value:g}" for name, value in cluster.needs.items())
            raise ConfigError(f"{setting}=ray: no node of the cluster has room for a worker ({needs}): see engine.*")
        yield cluster
    finally:
        ray.shutdown()


class RayWorkers:
    """Workers on a cluster, as `hotloop.train.workers.Workers` are some of this machine.

    Args:
        cluster: that this process is connected to.
        function: ``module:function`` that each runs.
    """

    def __init__(self, cluster: Cluster, function: str) -> None:
        self._ray, self._function = cluster.ray, function
        self._call = cluster.ray.remote(called).options(**cluster.needs, max_retries=0, max_calls=1)
        self._running: dict[int, Any] = {}

    @property
    def running(self) -> list[int]:
        """The numbers of those that run."""
        return list(self._running)

    def log(self, number: int) -> Path:
        """Return the name of the output of a worker, which Ray has."""
        return Path(f"Ray's log of worker {number}")

    def start(self, number: int, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:  # noqa: ARG002 - Ray shares GPUs out
        """Start a worker."""
        self._running[number] = self._call.remote(self._function, dict(arguments))

    def ended(self) -> list[Ended]:
        """Return the workers that have ended since the last call."""
        if not self._running:
            return []
        ready, _ = self._ray.wait(list(self._running.values()), num_returns=len(self._running), timeout=0)
        return [self._end(number) for number, one in list(self._running.items()) if one in ready]

    def interrupt(self) -> None:
        """Ask all to stop, as Ctrl-C does."""
        for one in self._running.values():
            self._ray.cancel(one)

    def close(self) -> None:
        """Leave no worker behind."""
        for one in self._running.values():
            self._ray.cancel(one, force=True)
        self._running.clear()

    def _end(self, number: int) -> Ended:
        try:
            return ended(number, self._ray.get(self._running.pop(number)))
        except self._ray.exceptions.TaskCancelledError:
            return Ended(number, error=KeyboardInterrupt())
        except self._ray.exceptions.RayError as error:
            return Ended(number, died=" ".join(str(error).split())[-300:])
