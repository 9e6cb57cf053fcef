"""A Ray cluster that runs workers: what is wrong with it is told before work starts, and lost workers are said to be.

A worker is an actor of Ray's, which keeps its GPUs, and starts the process that does the work: the same process that
runs on one machine, with torch, CUDA and compiled code kept from one trial to the next. A plain task of Ray's would
begin with none of them. Ray decides where the actor runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import host
from hotloop.errors import ConfigError
from hotloop.files import whole
from hotloop.train.child import WorkerLostError
from hotloop.train.optional import require
from hotloop.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from hotloop.train.settings import Settings

_PROBE_SECONDS, _HEAR_SECONDS = 5.0, 1.0
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
_START = "Start Ray there by `ray start --head`, correct engine.address, or leave {setting} out"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Args:
        ray: the module.
        setting: what asks for it, ``hpo.engine`` or ``kfold.engine``.
        settings: of a run.
        nodes: the resources of each node that is alive.
        head: ``HOST:PORT`` at which the cluster's head answers.
    """

    ray: Any
    setting: str
    settings: Settings
    nodes: tuple[Mapping[str, float], ...]
    head: str = ""

    def answers(self) -> bool:
        """Say whether the head answers. Ray itself ends a process a minute after its head was lost, without a word."""
        try:
            _reach(self.head)
        except OSError:
            return False
        return True

    @property
    def needs(self) -> dict[str, float]:
        """What a worker takes of a node: ``num_cpus`` and ``num_gpus``."""
        engine, run = self.settings.engine, self.settings.run
        elsewhere = run.accelerator in ("cpu", "mps") or run.device.partition(":")[0] in ("cpu", "mps")
        there = any(one.get("GPU") for one in self.nodes)
        usual = run.devices if (there or _asks(self.settings)) and not elsewhere else 0
        return {"num_cpus": engine.num_cpus, "num_gpus": usual if engine.num_gpus is None else engine.num_gpus}

    @property
    def room(self) -> int:
        """How many workers the cluster has room for while nobody else uses it."""
        return sum(_fit(one, self.needs) for one in self.nodes)

    def check(self) -> None:
        """Check that some node has what a worker needs.

        Raises:
            ConfigError: none has.
        """
        if self.settings.run.device.startswith("cuda:"):
            raise ConfigError(
                f"run.device={self.settings.run.device} with {self.setting}=ray: Ray chooses the GPU; set "
                "run.device=cuda, or leave it out"
            )
        for name, kind in (("num_gpus", "GPU"), ("num_cpus", "CPU")):
            most, wanted = max((one.get(kind, 0) for one in self.nodes), default=0), self.needs[name]
            if wanted > most:
                given = getattr(self.settings.engine, name) is not None
                why = f"engine.{name}={wanted:g}" if given else f"{_asks(self.settings)} needs {wanted:g} {kind}s, and"
                least = "set run.accelerator=cpu, or add a node with GPUs"
                least = f"set engine.{name}={most:g} or lower, or add a node" if most else least
                raise ConfigError(
                    f"{why}{':' if given else ''} no node of the cluster has as many {kind}s, the most is {most:g}: "
                    f"{least}"
                )
        if not self.room:
            raise ConfigError(
                f"engine.num_cpus={self.needs['num_cpus']:g} and engine.num_gpus={self.needs['num_gpus']:g}: no node "
                "of the cluster has both; lower one of them, or add a node"
            )


def _asks(settings: Settings) -> str:
    """Say which setting asks for a GPU whatever there is; empty where none does."""
    run = settings.run
    if run.device.partition(":")[0] == "cuda":
        return f"run.device={run.device}"
    return "run.accelerator=cuda" if run.accelerator == "cuda" else ""


def _fit(node: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Count the workers that a node has room for."""
    wanted = ((node.get("CPU", 0), needs["num_cpus"]), (node.get("GPU", 0), needs["num_gpus"]))
    return min((int(has / need + 1e-9) for has, need in wanted if need), default=os.cpu_count() or 1)


@contextlib.contextmanager
def connected(settings: Settings, setting: str) -> Iterator[Cluster]:
    """Be connected to the cluster of ``engine.address`` while the block runs.

    Raises:
        ConfigError: nobody answers there, it has another version of Ray or Python, or no node has what a worker needs.
        MissingExtraError: Ray is not installed.
    """
    # Ours start no cluster; a cluster that Ray starts by itself would send statistics, unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", f"{setting}=ray", "ray")
    address = settings.engine.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    _probe(address, setting)
    try:
        _init(ray, address, setting)
        nodes = tuple(one["Resources"] for one in ray.nodes() if one["Alive"])
        head = ray.get_runtime_context().gcs_address if address == "auto" else address.removeprefix("ray://")
        cluster = Cluster(ray, setting, settings, nodes, head)
        cluster.check()
        yield cluster
    finally:
        ray.shutdown()


def _init(ray: Any, address: str, setting: str) -> None:
    try:
        try:
            ray.init(address=address, **_QUIET)
        except ConnectionError:
            if not address.startswith("ray://"):
                raise
            # The head starts a server for each client, and gives up after 30 s: a busy one has it ready by now.
            ray.shutdown()
            ray.init(address=address, **_QUIET)
    except (Exception, SystemExit) as error:
        raise ConfigError(_refusal(address, setting, error)) from error


def _probe(address: str, setting: str) -> None:
    """Refuse an address that nobody answers; Ray itself would wait for minutes."""
    if address == "auto":
        return
    name, _, port = address.removeprefix("ray://").rpartition(":")
    if not name or not port.isdigit():
        raise ConfigError(f"engine.address={address}: expected auto, HOST:PORT (6379) or ray://HOST:PORT (10001)")
    try:
        _reach(address.removeprefix("ray://"))
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"engine.address={address}: nobody answers there ({error}). {_START.format(setting=setting)}"
        ) from error


def _reach(address: str) -> None:
    name, _, port = address.rpartition(":")
    socket.create_connection((name.strip("[]"), int(port)), _PROBE_SECONDS).close()


def _refusal(address: str, setting: str, error: BaseException) -> str:
    said = " ".join(str(error).split())
    if "mismatch" in said.lower():
        return (
            f"engine.address={address}: {said[:400]}. Install the cluster's versions of Ray and Python here, or these "
            "on all nodes"
        )
    if address == "auto":
        return f"engine.address=auto: no Ray runs on this machine. {_START.format(setting=setting)}"
    return f"engine.address={address}: {said[:400] or type(error).__name__}. {_START.format(setting=setting)}"


class RemoteChild:
    """A worker on a node of the cluster, as `hotloop.train.child.Child` is one on this machine.

    Args:
        cluster: that this process is connected to.
        module: runs in it.
        log: has what it prints, in a folder that all nodes share. With ``run.storage`` they need none, and Ray's own
            log of the worker has it.
    """

    def __init__(self, cluster: Cluster, module: str, log: Path) -> None:
        self.log: Path | str = log
        self._ray, self._ended, self._line, self._left = cluster.ray, "", None, False
        shared = None
        if cluster.settings.run.storage is None:
            log = log.absolute()
            log.parent.mkdir(parents=True, exist_ok=True)
            token = log.with_suffix(".token")
            with whole(token, durable=False) as file:
                file.write((key := secrets.token_hex(8)).encode())
            shared = str(log), str(token), key
        else:
            self.log = "in Ray's log of the worker"
        self._host = _host(cluster.ray).options(**cluster.needs, max_restarts=0).remote()
        command = host.python("-m", module)[1:]  # by the node's own interpreter
        self._start = self._host.start.remote(command, str(Path.cwd()), shared, __version__)

    @property
    def waits(self) -> bool:
        """Whether it waits for a node: the cluster has no room, or its process is not started yet."""
        return self._start is not None

    def send(self, what: Mapping[str, Any] | None) -> None:
        """Hand over work, or an answer; None says that there is no more."""
        self._host.send.remote(json.dumps(what) + "\n")  # where it is lost, `hear` says so

    def hear(self) -> dict[str, Any] | None:
        """Return what it tells next; None once it has ended.

        Raises:
            ConfigError: its node cannot run it.
            WorkerLostError: its process or its node is lost.
        """
        try:
            if self._start is not None and (problem := self._get(self._start)):
                raise ConfigError(problem)
            self._start = None
            while line := self._next():
                with contextlib.suppress(ValueError):  # a kill can cut a line in two
                    found: dict[str, Any] = json.loads(line)
                    return found
            self._ended = self._get(self._host.how.remote())
        except self._ray.exceptions.RayError as error:
            self._ended = "its process or its node on the cluster was lost"
            raise WorkerLostError(self._ended) from error
        return None

    def _next(self) -> str:
        """Return its next line; one that Ctrl-C kept from coming here is the next one then."""
        self._line = self._line or self._host.line.remote()
        found: str = self._get(self._line)
        self._line = None
        return found

    def _get(self, what: Any) -> Any:
        while True:
            try:
                return self._ray.get(what, timeout=_HEAR_SECONDS)
            except self._ray.exceptions.GetTimeoutError:
                if self._left:
                    raise

    def interrupt(self) -> None:
        """Ask it to stop, as Ctrl-C does."""
        self._host.interrupt.remote()

    def leave(self) -> None:
        """Wait for it no longer: a thread that does so while the connection is closed crashes in Ray."""
        self._left = True

    def end(self) -> str:
        """End it, if it has not ended, and say how it ended."""
        self.leave()
        self._ray.kill(self._host)
        return self._ended or "it was ended"


def _host(ray: Any) -> Any:
    """Return the actor; made here, so that Ray carries it as it is to nodes that may have another hotloop, or none."""

    @ray.remote(concurrency_groups={"told": 1, "tells": 1})
    class Host:
        @ray.method(concurrency_group="told")  # type: ignore[untyped-decorator]
        def start(self, command: list[str], here: str, shared: tuple[str, str, str] | None, version: str) -> str:
            """Start the process, or say why this node cannot; ``shared`` is its log, and a file with what is in it."""
            node = socket.gethostname()
            if importlib.util.find_spec("hotloop") is None:
                return f"node {node} has no hotloop for {sys.executable}: install version {version} on all nodes"
            own = importlib.import_module("hotloop.version").__version__

            if own != version:
                return f"node {node} has hotloop {own}, and this is {version}: install one version on all nodes"
            try:
                if shared and Path(shared[1]).read_text(encoding="utf-8") != shared[2]:
                    return f"node {node} has another folder at {Path(shared[0]).parent}: name one that nodes share"
                there = shared or Path(here).is_dir()  # else that of the job, whose files Ray brings along
                append = importlib.import_module("hotloop.files").open_append
                with append(Path(shared[0])) if shared else contextlib.nullcontext() as errors:
                    self.process: Any = subprocess.Popen(  # noqa: S603 - this very program
                        [sys.executable, *command], cwd=here if there else None, start_new_session=True,
                        text=True, encoding="utf-8", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    )  # fmt: skip
            except OSError as error:
                same = "the working folder and the folder of the runs have to be the same ones on all nodes"
                return f"node {node}: {error}; {same}. Name folders on a path that they share, or run.storage"
            return ""

        @ray.method(concurrency_group="told")  # type: ignore[untyped-decorator]
        def send(self, line: str) -> None:
            with contextlib.suppress(OSError):  # it is dead, and `line` says so
                self.process.stdin.write(line)
                self.process.stdin.flush()

        @ray.method(concurrency_group="told")  # type: ignore[untyped-decorator]
        def interrupt(self) -> None:
            self.process.send_signal(2)

        @ray.method(concurrency_group="tells")  # type: ignore[untyped-decorator]
        def line(self) -> str:
            return str(self.process.stdout.readline())

        @ray.method(concurrency_group="tells")  # type: ignore[untyped-decorator]
        def how(self) -> str:
            code = self.process.wait()
            return f"exit code {code}" if code >= 0 else f"signal {-code}"

    return Host
