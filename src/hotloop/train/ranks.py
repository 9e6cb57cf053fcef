"""The processes of a run on several devices: the first one leads, and all of them decide alike.

The first process has the run's folder, record, checkpoints and loggers. The others are started by it, print nothing,
write nothing, and end with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import gc
import importlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed

from hotloop.errors import ConfigError, HotloopError, RunPrunedError, TrainingFailedError
from hotloop.measure import machine
from hotloop.train import configure, sharding
from hotloop.train.optional import require
from hotloop.train.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hotloop.presets import Preset
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start

T = TypeVar("T")
GRACE_SECONDS = 30.0
"""How long the first process may go on after another one was lost, until it is ended: it may wait for that one."""
_JOINED = "HOTLOOP_JOINED"
"""In the environment of the other processes."""
_ENDED = "the first process has ended the run"
_MOST_ON_FEW_CORES = 4
"""Processes that any machine may have on CPUs, to try a program out."""
_PATIENCE = dt.timedelta(days=1)
"""How long a process waits where the first one writes a checkpoint, or waits for room on the disk."""


class Ranks:
    """The one process of a run, and the form of several."""

    rank, size = 0, 1

    @property
    def first(self) -> bool:
        """Whether this process leads: it alone writes and prints."""
        return self.rank == 0

    def mean(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each figure over all processes."""
        return dict(figures)

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Say of each flag whether it is set in some process."""
        return flags

    def gathered(self, value: T) -> list[T]:
        """Return the value of each process, in order."""
        return [value]

    def led(self, act: Callable[[], None]) -> None:
        """Do something in the first process, while the others wait.

        Raises:
            RunPrunedError: it failed there, so the others end as well.
        """
        act()

    def after_first(self, make: Callable[[], T]) -> T:
        """Return what each process makes: the first one before the others, which find what it keeps on disk.

        Raises:
            RunPrunedError: it failed in the first one, so the others end as well.
        """
        made: list[T] = []
        self.led(lambda: made.append(make()))
        return made[0] if made else make()

    def explain(self, error: Exception) -> TrainingFailedError | None:  # noqa: ARG002 - alone, nothing else is lost
        """Say that another process was lost, if that is why this one has an error."""
        return None


class Several(Ranks):
    """The processes of a run, this one among them; made once they have met.

    Args:
        lost: says which other process has ended, and how; empty while none has.
    """

    def __init__(self, lost: Callable[[], str]) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._lost = lost
        # A group of its own, on the CPU: it waits longer than the collectives of the model.
        self._group = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def mean(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the mean of each figure over all processes; they have the same figures."""
        if not figures:
            return {}
        found = torch.tensor(list(figures.values()), dtype=torch.float64)
        distributed.all_reduce(found, group=self._group)
        return dict(zip(figures, (found / self.size).tolist(), strict=True))

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Say of each flag whether it is set in some process."""
        found = torch.tensor([int(one) for one in flags])
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=self._group)
        return tuple(bool(one) for one in found.tolist())

    def gathered(self, value: T) -> list[T]:
        """Return the value of each process, in order."""
        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value, group=self._group)
        return found

    def led(self, act: Callable[[], None]) -> None:
        """Do something in the first process, while the others wait."""
        failed = True
        try:
            if self.first:
                act()
            failed = False
        finally:
            (failed,) = self.any(failed)
        if failed:
            raise RunPrunedError(_ENDED)

    def explain(self, error: Exception) -> TrainingFailedError | None:
        """Say that another process was lost, if that is why this one has an error."""
        if isinstance(error, HotloopError):  # all processes have come to it
            return None
        # Its end is heard of later than that of its connection: on a busy machine by many seconds.
        until = time.monotonic() + (GRACE_SECONDS if "Connection" in str(error) else 2.0)
        while not self._lost() and time.monotonic() < until:
            time.sleep(0.05)
        return TrainingFailedError(self._lost()) if self._lost() else None


def check_shares(ranks: Ranks, batch: Any, remedy: str) -> None:
    """Check that each process trains on batches of its own; ``remedy`` says how to share them out.

    Raises:
        ConfigError: all have the same first batch.
    """
    if ranks.size > 1 and len(set(ranks.gathered(tuple(one.double().sum().item() for one in _tensors(batch))))) == 1:
        raise ConfigError(
            f"run.devices={ranks.size}: all devices have the same first batch, so they would train on the same rows. "
            f"{remedy}"
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)
    elif dataclasses.is_dataclass(value):
        yield from _tensors(vars(value))


@dataclasses.dataclass(frozen=True)
class Devices:
    """Fabric, which has launched, and the processes that it runs in."""

    fabric: Any
    ranks: Ranks

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses of float16."""
        return getattr(self.fabric.strategy.precision, "scaler", None)

    @property
    def wrappers(self) -> Sequence[torch.nn.Module]:
        """What averages gradients over the processes: DDP around each model that was set up."""
        return tuple(getattr(self.fabric.strategy, "wrappers", ()))


def where(device: torch.device, ranks: Ranks, settings: Settings) -> str:
    """Say in words on what a run trains."""
    several = f", {ranks.size} processes, {settings.run.strategy}" if ranks.size > 1 else ""
    return f"{machine.device_name(device)} ({device}){several}"


@contextlib.contextmanager
def devices(start: Start) -> Iterator[Devices]:
    """Start the other processes of a run, or join the first one in one of them; they have ended when the block has."""
    run = start.settings.run
    if run.devices == 1:
        yield Devices(_fabric(start.settings), Ranks())
        return
    with contextlib.ExitStack() as stack:
        lost: Callable[[], str] = str
        if _JOINED not in os.environ:
            lost = stack.enter_context(_others(start))
        fabric = _fabric(start.settings)
        fabric.launch()
        stack.callback(distributed.destroy_process_group)
        several = Several(lost)
        yield Devices(fabric, several)
        gc.collect()  # what holds the group goes before it
        several.any(False)  # all are here; the first one may have waited for a logger


def check(settings: Settings) -> None:
    """Check that a run's devices, strategy and precision can be used here, and together.

    Raises:
        ConfigError: they cannot.
    """
    run, precision = settings.run, settings.precision
    if run.device != "auto" and (run.devices > 1 or run.accelerator != "auto"):
        other = f"run.devices={run.devices}" if run.devices > 1 else f"run.accelerator={run.accelerator}"
        raise ConfigError(f"run.device={run.device} with {other}: it names the one device of a run; leave it out")
    kind = kind_of(run.accelerator) if run.device == "auto" else run.device.partition(":")[0]
    there = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    most = there.get(kind, max(os.cpu_count() or 1, _MOST_ON_FEW_CORES))
    if run.devices > most and (kind in there or run.resume is None):
        raise ConfigError(
            f"run.devices={run.devices} with run.accelerator={run.accelerator}: at most {most} of {kind} can be used "
            "here; set run.devices to that or lower, or run.accelerator=cpu"
        )
    if precision == "16-mixed" and (kind == "cpu" or run.strategy == "fsdp2"):
        raise ConfigError(
            f"run.precision=16-mixed: Lightning scales no losses on a CPU, nor of sharded models "
            f"(run.strategy={run.strategy} on {kind}); set run.precision=bf16-mixed"
        )


def check_presets(settings: Settings, presets: Iterable[Preset]) -> None:
    """Check that no preset records the addresses of sharded parameters, which are gathered anew for each call.

    Raises:
        ConfigError: it does.
    """
    graphs = [one.name for one in presets if one.cudagraphs]
    if graphs and settings.run.strategy == "fsdp2":
        raise ConfigError(
            f"compile.preset={graphs[0]} with run.strategy=fsdp2: it captures CUDA graphs, and sharded parameters are "
            "gathered into other memory for each call; set compile.preset=default, or run.strategy=ddp"
        )


def kind_of(accelerator: str) -> str:
    """Return the kind of device that ``run.accelerator`` stands for here."""
    if accelerator != "auto":
        return accelerator
    return "cuda" if torch.cuda.device_count() else "mps" if torch.backends.mps.is_available() else "cpu"


def alone(settings: Settings) -> Any:
    """Return Fabric for one process, which judges what a run of any number of devices has trained.

    Raises:
        ConfigError: the run's accelerator is not here.
    """
    run = {"devices": 1, "strategy": "ddp"}
    if kind_of(settings.run.accelerator) == "cpu" and settings.precision == "16-mixed":  # of a run on a GPU
        run["precision"] = "32-true"
    one = settings.model_copy(update={"run": settings.run.model_copy(update=run)})
    check(one)
    return _fabric(one)


def _fabric(settings: Settings) -> Any:
    run = settings.run
    fabric = require("lightning.fabric", "A program that takes fabric")
    several: dict[str, Any] = {}
    if run.devices > 1 and run.strategy == "fsdp2":
        several["strategy"] = sharding.strategy(run.devices)
    elif run.devices > 1:
        several["strategy"] = _replicated()
    return fabric.Fabric(accelerator=run.accelerator, devices=run.devices, precision=settings.precision, **several)


def _replicated() -> Any:
    """Return Fabric's strategy that copies models, and knows the wrappers that it has made, as a hot loop has to."""
    kind = require("lightning.fabric.strategies", "A program that takes fabric").DDPStrategy

    class Replicated(kind):  # type: ignore[misc, valid-type]
        """Makes wrappers, and keeps them."""

        def __init__(self) -> None:
            super().__init__()
            self.wrappers: list[torch.nn.Module] = []

        def setup_module(self, module: torch.nn.Module) -> Any:
            self.wrappers.append(super().setup_module(module))
            return self.wrappers[-1]

    return Replicated()


@contextlib.contextmanager
def _others(start: Start) -> Iterator[Callable[[], str]]:
    """Start the other processes, and end them with the block; yields the function that says which of them was lost."""
    many, before = start.settings.run.devices, dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="hotloop-ranks-") as folder:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        place |= {"WORLD_SIZE": str(many), "NODE_RANK": "0"}
        if start.resume is not None:
            torch.save(start.resume, Path(folder) / "resume.pt")
        pool = Workers(f"{__name__}:join", Path(folder))
        job = {"settings": configure.to_dict(start.settings), "folder": str(start.folder), "place": folder}
        for rank in range(1, many):
            pool.start(rank, job, {**place, "LOCAL_RANK": str(rank)})
        os.environ.update({**place, "LOCAL_RANK": "0"})
        watch = _Watch(pool, many)
        try:
            yield lambda: watch.lost
            until = time.monotonic() + GRACE_SECONDS
            while pool.running and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            watch.over = True
            pool.close()
            for name in (*place, "LOCAL_RANK"):
                os.environ.pop(name, None)
                if name in before:
                    os.environ[name] = before[name]


class _Watch:
    """A thread that looks for a lost process; it ends this one if that waits for the lost one for ever."""

    def __init__(self, pool: Workers, many: int) -> None:
        self.lost, self.over, self._pool, self._many = "", False, pool, many
        threading.Thread(target=self._look, name="hotloop-ranks", daemon=True).start()

    def _look(self) -> None:
        while not self.over and not self.lost:
            for one in self._pool.ended():
                how = str(one.error or one.died)
                if not how.startswith("exit code 0") and how != _ENDED:
                    self.lost = f"rank {one.number} of {self._many} was lost: {how}"
            time.sleep(0.05)
        until = time.monotonic() + GRACE_SECONDS
        while not self.over and time.monotonic() < until:
            time.sleep(0.05)
        if not self.over:
            os.write(2, f"hotloop: {self.lost}; the run ends without it\n".encode())
            os._exit(1)


def _free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def join(settings: dict[str, Any], folder: str, place: str) -> None:
    """Run the first process's run in one of the others. Ctrl-C is for the first alone, and its death is this one's."""
    from rich.console import Console  # noqa: PLC0415 - for this process alone

    from hotloop.train.start import Start  # noqa: PLC0415

    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ[_JOINED] = "1"
    chosen, kept = configure.from_dict(settings), Path(place) / "resume.pt"
    document = torch.load(kept, weights_only=True) if kept.exists() else None
    recipe = importlib.import_module("hotloop.recipes").load(chosen.recipe.name)
    recipe.train(Start(chosen, Path(folder), document), Console(quiet=True))
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort a process now and then that ends in the usual way
