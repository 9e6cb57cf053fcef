"""``--dry-run``: what can be wrong before the first step is looked at; nothing is trained, and nothing is written."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.report.text import size
from hotloop.train import compiling
from hotloop.train.outcome import CHECKED, Outcome
from hotloop.train.turn import cannot_write

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hotloop.train.display import Display
    from hotloop.train.start import Start
    from hotloop.train.task import Plan, Task

_ADAM = 4
"""Times the size of a trained parameter that training holds: weights, gradient, and AdamW's two averages."""


def check_folder(folder: Path) -> None:
    """Check that a folder, or the folder in which it would be made, can be written; leave nothing behind.

    Raises:
        ConfigError: it cannot be written.
    """
    place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from error


def check(task: Task, start: Start, chosen: Plan, display: Display) -> Outcome:
    """Check a task: read one batch, and try what can be tried of it without training.

    Raises:
        ConfigError: there are no batches, the goal is none of the metrics, or the batch's memory is not there.
    """
    batch = next(iter(task.workload.read()), None)
    if batch is None:
        raise ConfigError(f"recipe={task.name}: its Workload has no batches")
    shown = task.probe(batch)
    parameters = (one for model in task.workload.models().values() for one in model.parameters())
    needed, said = memory(parameters, task.device)
    display.say(said)
    steps = task.steps(start.settings.training)
    return told(start, chosen, display, {"batch": shapes(shown), "steps": steps, "memory_bytes": needed})


def data_only(start: Start, chosen: Plan, display: Display) -> Outcome:
    """Check no more than what the recipe has read by now: what comes next would train or write."""
    return told(start, chosen, display, {})


def memory(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> tuple[int, str]:
    """Return the bytes of weights, gradients and AdamW's state, and a line that says them and what a GPU has free.

    Raises:
        ConfigError: the GPU has less.
    """
    needed = sum(one.nbytes * (_ADAM if one.requires_grad else 1) for one in parameters)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    said = f"weights, gradients and an optimizer's two moments (as AdamW's) take {size(needed)}, and activations more"
    if free is not None and needed > free:
        raise ConfigError(f"{said}: {device} has {size(free)} free. Use a smaller model, or free the GPU")
    return needed, f"Memory: {said}" + (f"; {size(free)} are free" if free is not None else "")


def told(start: Start, chosen: Plan, display: Display, found: dict[str, Any]) -> Outcome:
    """Say what would run."""
    check_folder(start.folder)
    if found:
        display.say(f"Batch: {', '.join(f'{name} {shape}'.strip() for name, shape in found['batch'].items())}")
        display.say(f"Steps: {found['steps']:,}")
    asked = start.settings.training.optimization.use_torch_compile
    names = (f"{name} {training.name} (without gradients {off.name})" for name, (training, off) in chosen.items())
    planned = f"{compiling.PREFIX} {', '.join(names)}" if chosen else compiling.DISABLED
    display.say(f"{compiling.PREFIX} A hot loop decides on each step" if asked == "auto" else planned)
    display.say(
        "Dry run: all but the step itself was checked; nothing trained or written. "
        f"The run would go into {start.folder}"
    )
    step = start.resume["position"]["step"] if start.resume else 0
    return Outcome(CHECKED, start.folder, step, 0, {}, {}, found, 0.0)


def shapes(batch: Any) -> dict[str, str]:
    """Return the type and shape of each tensor of a batch, by its place; what holds none is told by its type."""
    return dict(_walk(batch, "")) or {"": type(batch).__name__}


def _walk(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield name, f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for place, inner in enumerate(value):
            yield from _walk(inner, f"{name}[{place}]")
