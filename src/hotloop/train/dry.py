"""``--dry-run``: what can be wrong before the first step is looked at; nothing is trained, and nothing is written."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.train import compiling
from hotloop.train.outcome import CHECKED, Outcome
from hotloop.train.turn import cannot_write

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.train.display import Display
    from hotloop.train.start import Start
    from hotloop.train.task import Plan, Task


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
        ConfigError: there are no batches, or the goal is none of the metrics.
    """
    batch = next(iter(task.workload.read()), None)
    if batch is None:
        raise ConfigError(f"recipe={task.name}: its Workload has no batches")
    task.probe(batch)
    return data_only(start, chosen, display, steps=task.steps(start.settings.training))


def data_only(start: Start, chosen: Plan, display: Display, **found: Any) -> Outcome:
    """Say what would run, of a recipe whose next work would train or write."""
    check_folder(start.folder)
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
