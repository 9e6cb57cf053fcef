"""The ways to run one workload: one model for all of them, its compiles put on and taken off between steps."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.module import get_entry
from hotloop.compiling.apply import block_classes
from hotloop.compiling.control import Installed, paused, status
from hotloop.compiling.control import compile as compile_in_place
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.step.workload import Workload

EAGER, AS_GIVEN, BY_BLOCKS = "eager", "as given", "{} by blocks"


@dataclasses.dataclass
class Way:
    """One way to run: ``running`` is a context in which the workload's steps run so; the rest is what was measured."""

    name: str
    running: Callable[[], contextlib.AbstractContextManager[Any]]
    samples: list[float] = dataclasses.field(default_factory=list)
    first: list[float] = dataclasses.field(default_factory=list)
    peak_bytes: int | None = None
    cache_hits: int = 0
    failed: str = ""


class Ways:
    """Makes and switches the ways of a workload.

    Args:
        workload: whose models are compiled.
        preset: the preset that was asked for, or None for what the program itself compiles, else ``default``.

    Raises:
        ConfigError: the preset does not exist, or the program's own compile stands in its way.
    """

    def __init__(self, workload: Workload, preset: str | None) -> None:
        self.models = workload.models()
        self.targets = dict(_targets(self.models))
        self.given = any(_is_compiled(module) for model in self.models.values() for module in model.modules())
        if self.given and preset is not None and any(map(_is_wrapper, self.models.values())):
            raise ConfigError(
                f"--preset {preset}: the workload's model is compiled already by torch.compile(model); leave --preset "
                "out to look at the program as it is, or leave the compile out of the workload"
            )
        self.preset = presets.get(preset or "default").name
        self.as_given = self.given and preset is None
        self.name = AS_GIVEN if self.as_given else self.preset

    @property
    def names(self) -> dict[int, str]:
        """The path of each module by its id, the model's own name first."""
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
        inner = [getattr(one, "_orig_mod", None) for one in modules]  # what torch.compile(model) wraps
        return [*modules, *(one for one in inner if isinstance(one, torch.nn.Module))]

    def eager(self) -> Way:
        """The program without any compile, its own included."""
        return Way(EAGER, self._eagerly)

    @contextlib.contextmanager
    def _eagerly(self) -> Iterator[None]:
        # The stance is for what the program compiles without a module of its own, such as a loss function.
        with paused(self.models.values()), torch.compiler.set_stance("force_eager"):
            yield

    def compiled(self) -> Way:
        """The program compiled as it was asked for; compiles happen at its first steps."""
        if self.as_given:
            return Way(AS_GIVEN, contextlib.nullcontext)
        compile_in_place(self.targets, self.preset)
        return self._switched(self.preset)

    def by_blocks(self, components: Mapping[str, Any]) -> Way | None:
        """The program compiled by its repeated blocks; None where it has none, or was compiled so already.

        Args:
            components: what `components` gave of the program as it was compiled first.
        """
        if self.as_given or any(len(part["regions"]) > 1 for part in components.values()):
            return None
        if not any(block_classes(model) for model in self.targets.values()):
            return None
        compile_in_place(self.targets, self.preset, regions="blocks")
        return self._switched(BY_BLOCKS.format(self.preset))

    def _switched(self, name: str) -> Way:
        """Make the compile that is on now into a way that can be put on again, which compiles nothing."""
        held: list[Installed] = []

        @contextlib.contextmanager
        def running() -> Iterator[None]:
            for one in held:
                one.put_back()
            try:
                yield
            finally:
                held[:] = [Installed(model) for model in self.targets.values()]

        return Way(name, running)

    def components(self) -> dict[str, Any]:
        """Give each component's status as a record has it, while its way is on; none of what torch alone compiles."""
        known = self.targets
        if self.as_given:
            known = {name: model for name, model in self.models.items() if not _is_wrapper(model)}
        found = status(known).components
        return {name: part.to_dict() for name, part in found.items() if not self.as_given or part.requested != "none"}


def _targets(models: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Give what is to be compiled: each model, or the children of a dictionary of modules, which is never called."""
    for name, model in models.items():
        if not isinstance(model, torch.nn.ModuleDict):
            yield name, model
            continue
        for key, child in model.items():
            yield (key if len(models) == 1 else f"{name}.{key}"), child


def _is_wrapper(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod")


def _is_compiled(module: torch.nn.Module) -> bool:
    return _is_wrapper(module) or get_entry(module) is not None
