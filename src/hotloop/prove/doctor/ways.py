"""The ways to run one workload: one model serves all of them, and its compiles are switched between steps."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import linecache
import math
import statistics
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.module import get_entry
from hotloop._torch.own_compiles import uncompiled
from hotloop.compiling.apply import block_classes
from hotloop.compiling.control import Installed, paused, status
from hotloop.compiling.control import compile as compile_in_place
from hotloop.errors import ConfigError
from hotloop.events import Compiled
from hotloop.measure import interval, ratio_interval, typical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.events import Event
    from hotloop.step.workload import Workload

EAGER, AS_GIVEN, BY_BLOCKS = "eager", "as given", "{} by blocks"


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
        suggested: nobody asked for it; it is shown where it is faster than eager.
        place: file and line of the program that it concerns.
    """

    name: str
    running: Callable[[], contextlib.AbstractContextManager[Any]]
    samples: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    cache_hits: int = 0
    failed: str = ""
    suggested: bool = False
    place: tuple[str, int] | None = None

    def count_cache_hits(self, events: Sequence[Event]) -> None:
        """Count the graphs that came out of torch's caches."""
        self.cache_hits = sum(event.cache_hits for event in events if isinstance(event, Compiled))

    def figures(self) -> dict[str, Any]:
        """Return the figures for the record: a typical step, and the time that the first steps took beyond it."""
        figures: dict[str, Any] = {"failed": self.failed} if self.failed else {}
        if self.samples:
            step = typical(self.samples, skip=0)
            figures |= {"step_ms": step * 1e3, "steps": len(self.samples)}
            low, high = interval(self.samples)
            if math.isfinite(low) and math.isfinite(high):  # too few samples have no interval
                figures |= {"step_ms_low": low * 1e3, "step_ms_high": high * 1e3}
            figures["cold_seconds"] = sum(seconds - step for seconds in self.first if seconds > 2 * step)
        if self.cache_hits:
            figures["cache_hits"] = self.cache_hits
        if self.peak_bytes is not None:
            figures["peak_bytes"] = self.peak_bytes
        if self.suggested:
            figures["suggested"] = True
        if self.place is not None:
            figures |= {"file": self.place[0], "line": self.place[1], "source": linecache.getline(*self.place).strip()}
        return figures

    def beside(self, eager: Way) -> dict[str, Any]:
        """Return how many times as fast as eager the way is, step by step on the same batches, which differ in size.

        ``difference`` is ``none`` where the 95% interval holds 1; empty where a way was cut off.
        """
        if self.failed or not self.samples or len(self.samples) != len(eager.samples):
            return {}
        low, high = ratio_interval(eager.samples, self.samples)
        speed = statistics.median(theirs / ours for theirs, ours in zip(eager.samples, self.samples, strict=True))
        difference = "faster" if low > 1 else "slower" if high < 1 else "none"
        return {"speed": speed, "speed_low": low, "speed_high": high, "difference": difference}


class Ways:
    """Makes and switches the ways of a workload.

    Args:
        workload: whose models are compiled.
        preset: the preset that was asked for; None takes the program's own compile, or else ``default``.

    Raises:
        ConfigError: the preset does not exist, or the program's own compile prevents it.
    """

    def __init__(self, workload: Workload, preset: str | None) -> None:
        self.models = workload.models()
        self.targets = dict(self._targets())
        given = any(_is_compiled(module) for model in self.models.values() for module in model.modules())
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
        models = self.models.values()
        tensors = (tensor for model in models for tensor in itertools.chain(model.parameters(), model.buffers()))
        first = next(tensors, None)
        return torch.device("cpu") if first is None else first.device

    @property
    def holds_graph_memory(self) -> bool:
        """Whether the preset's CUDA graphs hold memory while another way runs, whose peak would include that."""
        preset = presets.get(self.preset)
        return preset.mode in ("reduce-overhead", "max-autotune") or bool(preset.options.get("triton.cudagraphs"))

    @property
    def names(self) -> dict[int, str]:
        """The path of each module by its id, which begins with the model's own name."""
        return {
            id(module): f"{name}.{path}" if path else name
            for name, model in self.models.items()
            for path, module in model.named_modules(remove_duplicate=False)
        }

    @property
    def compiled_modules(self) -> list[torch.nn.Module]:
        """The modules that are compiled, or will be."""
        if not self.as_given:
            return list(self.targets.values())
        modules = [module for model in self.models.values() for module in model.modules() if _is_compiled(module)]
        wrapped = [getattr(module, "_orig_mod", None) for module in modules]  # what torch.compile(model) wraps
        return [*modules, *(module for module in wrapped if isinstance(module, torch.nn.Module))]

    def eager(self) -> Way:
        """Return the program without any compile, not even its own."""
        return Way(EAGER, self.running_eagerly)

    @contextlib.contextmanager
    def running_eagerly(self) -> Iterator[None]:
        """Run the program without any compile while the block runs."""
        # Functions that the program compiles outside of any module, such as a loss, run uncompiled as well.
        with paused(self.models.values()), uncompiled():
            yield

    def compiled(self) -> Way:
        """Return the program compiled as asked; the compiles happen in its first steps."""
        if self.as_given:
            return Way(AS_GIVEN, contextlib.nullcontext)
        compile_in_place(self.targets, self.preset)
        return self._switched(self.preset)

    def by_blocks(self, components: Mapping[str, Any]) -> Way | None:
        """Return the program compiled by its repeated blocks; None if it has none, or was compiled so already.

        Args:
            components: the result of `components` while the first compile was in force.
        """
        if self.as_given or any(len(part["regions"]) > 1 for part in components.values()):
            return None
        if not any(block_classes(model) for model in self.targets.values()):
            return None
        compile_in_place(self.targets, self.preset, regions="blocks")
        return self._switched(BY_BLOCKS.format(self.preset))

    def _switched(self, name: str) -> Way:
        """Return a way that can put the compile that is in force now on again, without compiling anything."""
        installed: list[Installed] = []

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            for compiled in installed:
                compiled.put_back()
            try:
                yield
            finally:
                installed[:] = [Installed(model) for model in self.targets.values()]

        return Way(name, running)

    def components(self) -> dict[str, Any]:
        """Return the status of each component of the way in force; code that torch alone compiles has none."""
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
