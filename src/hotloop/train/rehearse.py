"""Before CUDA graphs are turned on: the harness tries them on copies of the model, with batches of the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.random_state import RandomState
from hotloop.compiling.fallback import missing
from hotloop.errors import ConfigError, describe
from hotloop.prove.harness.harness import Settings, rehearse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.events import Event
    from hotloop.presets import Preset
    from hotloop.step import Workload
    from hotloop.train.task import Plan, Task

CALLS = 2
"""Calls without gradients after each training step of a rehearsal."""
ROUNDS = 4
_log = logging.getLogger("hotloop")


def unsafe(task: Task, plan: Plan, more: Mapping[str, Any], events: list[Event]) -> str:
    """Say why the presets with CUDA graphs of a plan are not safe for a task; empty where they are.

    Only modules are rehearsed: a loss that is a function stays as written.

    Args:
        task: trained later; its trial is made with its weights as they are now.
        plan: the presets by component.
        more: arguments of `hotloop.compile` besides the presets.
        events: of the run, as they are observed; those of the trial are taken out again.
    """
    chosen = {name: both for name, both in plan.items() if isinstance(task.parts[name], torch.nn.Module)}
    return tried(lambda: task.trial(list(chosen)), chosen, more, task.device, events)


def tried(
    make: Callable[[], Workload], chosen: Plan, more: Mapping[str, Any], device: torch.device, events: list[Event]
) -> str:
    """Try presets with CUDA graphs on programs made for it; says why they are not safe, and nothing where they are.

    The run's random numbers are left alone, and so are the events that were observed of anything else.
    """
    random, observed = RandomState([device]), len(events)
    try:
        found = rehearse(make, Settings(chosen=chosen, more=more), ROUNDS, CALLS)
    except ConfigError as error:
        return f"it could not be tried on a copy of the model: {error}"
    except Exception as error:  # noqa: BLE001 - whatever keeps it from being tried, the run goes on eager
        _log.warning("CUDA graphs could not be tried on a copy of the model, and stay off", exc_info=True)
        return f"it could not be tried on a copy of the model: {describe(error)}"
    finally:
        random.restore()
        for index in reversed(range(observed, len(events))):  # one by one: other threads may append at any time
            if (events[index].component or "") in chosen:
                del events[index]
    return "" if found.worst is None else f"{found.worst.kind}: {found.worst.what}"


def without_graphs(plan: Plan, device: str) -> Plan:
    """Return a plan with eager in place of each preset with CUDA graphs that this machine can run."""
    eager = presets.get("none")

    def safe(preset: Preset) -> Preset:
        return eager if preset.cudagraphs and not missing(preset, device) else preset

    found = {name: (safe(training), safe(inference)) for name, (training, inference) in plan.items()}
    return {name: both for name, both in found.items() if any(one.backend != "eager" for one in both)}
