"""Workers of this machine or of a Ray cluster, given work until there is no more; a lost one is started again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import workers
from hotloop.train.interrupt import Interrupt
from hotloop.train.optional import require
from hotloop.train.workers import Ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.train.settings import Settings

_PROBE_SECONDS, _EVERY_SECONDS = 5.0, 0.2


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
        fit = ([int(one.get(kind, 0) / need + 1e-9) for kind, need in wanted.items() if need] for one in self.nodes)
        return sum(min(each, default=os.cpu_count() or 1) for each in fit)


@contextlib.contextmanager
def connected(settings: Settings) -> Iterator[Cluster]:
    """Connect to the cluster of ``engine.address`` while the block runs.

    Raises:
        ConfigError: nobody answers there, it has another version of Ray or Python, or no node has room for a worker.
        MissingExtraError: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", "engine=ray", "ray")
    address = settings.engine.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    try:
        if address != "auto":  # Ray itself would wait for minutes
            name, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((name.strip("[]"), int(port)), _PROBE_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())[:400] or type(error).__name__
        raise ConfigError(
            f"engine.address={address}: {said}. Start Ray there by `ray start --head`, or correct engine.address"
        ) from error
    try:
        cluster = Cluster(ray, settings, tuple(one["Resources"] for one in ray.nodes() if one["Alive"]))
        if not cluster.room:
            raise ConfigError(f"no node of the cluster has room for a worker ({cluster.needs}): see engine.*")
        yield cluster
    finally:
        ray.shutdown()


def count(asked: int | str, settings: Settings, engine: str) -> int:
    """Return how many workers ``auto`` stands for, here or on the cluster, which has to answer."""
    if engine != "ray":
        return workers.count(asked, settings)
    with connected(settings) as found:
        return found.room if isinstance(asked, str) else asked


@contextlib.contextmanager
def pool(function: str, settings: Settings, engine: str, folder: Path) -> Iterator[workers.Workers | RayWorkers]:
    """Yield workers of this machine or of the cluster; ``folder`` has the logs of those of this machine."""
    if engine != "ray":
        yield workers.Workers(function, folder)
        return
    with connected(settings) as found:
        yield RayWorkers(found, function)


def watch(  # noqa: PLR0913, PLR0917 - the workers, and who is asked and told
    pool: workers.Workers | RayWorkers,
    settings: Settings,
    many: int,
    more: Callable[[int], Mapping[str, Any] | None],
    over: Callable[[Ended], None],
    tell: Callable[[], None],
) -> bool:
    """Give workers work until there is no more, and return whether somebody interrupted.

    Args:
        pool: has the workers; none is left at the end.
        settings: of a run, by which the GPUs are shared out.
        many: how many work at a time, counted from 1.
        more: gives the arguments of a worker that is free; None where there is nothing to do for it.
        over: takes how a worker ended; an error that it raises ends all.
        tell: is called a few times a second.
    """
    failure: Exception | None = None
    asked = False
    with Interrupt("finishing the steps of all workers") as interrupt, contextlib.closing(pool):
        free = list(range(1, many + 1))
        while free or pool.running:
            for number in free:
                if not asked and (given := more(number)) is not None:
                    pool.start(number, given, workers.environment(settings, many, number))
            time.sleep(_EVERY_SECONDS)
            gone = pool.ended()
            for one in gone:
                try:
                    over(one)
                except Exception as error:  # noqa: BLE001 - raised when the others have ended
                    failure = failure or error
            tell()
            free = [one.number for one in gone]
            if (interrupt.signal or failure) and not asked:
                asked = True
                pool.interrupt()
        if failure:
            raise failure
    return asked


class RayWorkers:
    """Workers on a cluster, as `hotloop.train.workers.Workers` are some of this machine.

    Args:
        cluster: that this process is connected to.
        function: ``module:function`` that each runs.
    """

    def __init__(self, cluster: Cluster, function: str) -> None:
        self._ray, self._function = cluster.ray, function
        self._call = cluster.ray.remote(max_calls=1, max_retries=0)(workers.called).options(**cluster.needs)
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
            return workers.ended(number, self._ray.get(self._running.pop(number)))
        except self._ray.exceptions.TaskCancelledError:
            return Ended(number, error=KeyboardInterrupt())
        except self._ray.exceptions.RayError as error:
            return Ended(number, died=" ".join(str(error).split())[-300:])
