"""The ways to run one workload: eager, and compiled. One model serves both."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.module import get_entry
from hotloop._torch.own_compiles import uncompiled
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import paused, status
from hotloop.errors import ConfigError
from hotloop.measure import interval, typical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.workload import Workload

EAGER, AS_GIVEN = "eager", "as given"


@dataclasses.dataclass
class Way:
    """A way to run, and its measurements.

    Args:
        name: shown to the user.
        running: makes a context in which the workload's steps run this way.
        samples: seconds of the timed steps.
        first: seconds of the first steps, compiles included.
        peak_bytes: the most memory allocated on a GPU; None on a CPU.
        cache_hits: graphs that came out of torch's caches, so that getting them ready was not cold.
        failed: why the way stopped; empty while it runs.
    """

    name: str
    running: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    samples: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    cache_hits: int = 0
    failed: str = ""

    def figures(self) -> dict[str, Any]:
        """Return the figures for the record: a typical step, and the time that the first steps took beyond it."""
        known = {"failed": self.failed or None, "cache_hits": self.cache_hits or None, "peak_bytes": self.peak_bytes}
        figures: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        if not self.samples:
            return figures
        step = typical(self.samples, skip=0)
        low, high = interval(self.samples)
        if math.isfinite(low) and math.isfinite(high):  # too few samples have no interval
            figures |= {"step_ms_low": low * 1e3, "step_ms_high": high * 1e3}
        cold = sum(seconds - step for seconds in self.first if seconds > 2 * step)
        return {**figures, "step_ms": step * 1e3, "steps": len(self.samples), "cold_seconds": cold}


class Ways:
    """Makes the ways of a workload.

    Args:
        workload: whose models are compiled.
        preset: the preset that was asked for; None takes the program's own compile, or else ``default``.

    Raises:
        ConfigError: the preset does not exist, or the program's own compile prevents it.
    """

    def __init__(self, workload: Workload, preset: str | None) -> None:
        self.models = workload.models()
        self.targets = dict(self._targets())
        self._modules = [module for model in self.models.values() for module in model.modules()]
        given = any(map(_is_compiled, self._modules))
        if given and preset is not None and any(map(_is_wrapper, self.models.values())):
            raise ConfigError(
                f"--preset {preset}: the workload's model is compiled already by torch.compile(model); leave --preset "
                "out to look at the program as it is, or leave the compile out of the workload"
            )
        self.preset = presets.get(preset or "default").name
        self.as_given = given and preset is None
        self.name = AS_GIVEN if self.as_given else self.preset

    def _targets(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules to compile: each model, or the children of a ModuleDict, which itself is never called."""
        for name, model in self.models.items():
            if not isinstance(model, torch.nn.ModuleDict):
                yield name, model
                continue
            for key, child in model.items():
                yield (key if len(self.models) == 1 else f"{name}.{key}"), child

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; the CPU if there is none."""
        tensors = (itertools.chain(model.parameters(), model.buffers()) for model in self.models.values())
        first = next(itertools.chain.from_iterable(tensors), None)
        return torch.device("cpu") if first is None else first.device

    @property
    def compiled_modules(self) -> list[torch.nn.Module]:
        """The modules that are compiled, or will be."""
        if not self.as_given:
            return list(self.targets.values())
        modules = list(filter(_is_compiled, self._modules))
        wrapped = [getattr(module, "_orig_mod", None) for module in modules]  # what torch.compile(model) wraps
        return [*modules, *(module for module in wrapped if isinstance(module, torch.nn.Module))]

    @contextlib.contextmanager
    def running_eagerly(self) -> Iterator[None]:
        """Run the program without any compile while the block runs, not even its own."""
        # Functions that the program compiles outside of any module, such as a loss, run uncompiled as well.
        with paused(self.models.values()), uncompiled():
            yield

    def compiled(self) -> Way:
        """Return the program compiled as asked; the compiles happen in its first steps."""
        if not self.as_given:
            compile_in_place(self.targets, self.preset)
        return Way(self.name)

    def components(self) -> dict[str, Any]:
        """Return the status of each component; code that torch alone compiles has none."""
        models = self.targets
        if self.as_given:
            models = {name: model for name, model in self.models.items() if not _is_wrapper(model)}
        components = status(models).components
        return {
            name: part.to_dict() for name, part in components.items() if not self.as_given or part.requested != "none"
        }


def _is_wrapper(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod")


def _is_compiled(module: torch.nn.Module) -> bool:
    return _is_wrapper(module) or get_entry(module) is not None
