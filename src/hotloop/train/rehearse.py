"""Before CUDA graphs are turned on: the harness tries them on copies of the model, with batches of the run."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop._torch.random_state import RandomState
from hotloop.compiling.fallback import missing
from hotloop.errors import ConfigError, describe
from hotloop.presets import Preset
from hotloop.prove.harness.harness import Settings, rehearse
from hotloop.step import Workload
from hotloop.step.calls.preview import generators_of

if TYPE_CHECKING:
    from hotloop.events import Event
    from hotloop.train.batches import Batch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Plan = Mapping[str, tuple[Preset, Preset]]
"""The presets of each component that is to be compiled, for training and for inference."""
CALLS = 2
"""Calls without gradients after each training step of a rehearsal."""
ROUNDS = 4
_log = logging.getLogger("hotloop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a rehearsal trains: copies of these.

    Args:
        model: gives an output of a batch's inputs by name; still eager.
        parts: the components by name; those that are modules are parts of the model.
        batches: a few of the run's own, on its device.
        optimizer: makes one for a copy.
        autocast: gives the run's context of precision.
        more: arguments of `hotloop.compile` besides the presets.
        events: of the run, as they are observed; those of the copies are taken out again.
    """

    model: torch.nn.Module
    parts: Mapping[str, Any]
    batches: Sequence[Batch]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    autocast: Callable[[], Any]
    more: Mapping[str, Any]
    events: list[Event]

    def unsafe(self, plan: Plan) -> str:
        """Say why the presets with CUDA graphs of a plan are not safe here; empty where they are.

        Only modules are rehearsed: a loss that is a function stays as written. The run's random numbers are left alone.
        """
        names = [name for name in plan if isinstance(self.parts[name], torch.nn.Module)]
        chosen = {name: plan[name] for name in names}
        return tried(lambda: self._workload(names), chosen, self.more, self.batches[0].labels.device, self.events)

    def _workload(self, names: Sequence[str]) -> Workload:
        """Return a copy of the run's training, which begins at the run's own state."""
        model, parts = copy.deepcopy((self.model, {name: self.parts[name] for name in names}))
        model.train()
        loss: Loss = parts.get("loss", self.parts["loss"])
        optimizer = self.optimizer(model)

        def step(batch: Batch) -> torch.Tensor:
            with self.autocast():
                value = loss(model(**batch.inputs), batch.labels)
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        def infer(batch: Batch) -> torch.Tensor:
            model.eval()
            with self.autocast():
                output: torch.Tensor = model(**batch.inputs)
            model.train()
            return output

        modules = {name: part for name, part in parts.items() if isinstance(part, torch.nn.Module)}
        return Workload(modules, optimizer, step, list(self.batches), infer=infer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnRehearsal:
    """What a rehearsal of a user's own program trains: one made anew, with the weights of the run's.

    Args:
        make: makes the program anew.
        workload: the run's.
        device: where it computes.
        more: arguments of `hotloop.compile` besides the presets.
        events: of the run, as they are observed; those of the program that is tried are taken out again.
    """

    make: Callable[[], Workload]
    workload: Workload
    device: torch.device
    more: Mapping[str, Any]
    events: list[Event]

    def unsafe(self, plan: Plan) -> str:
        """Say why the presets with CUDA graphs of a plan are not safe here; empty where they are."""
        return tried(self._workload, plan, self.more, self.device, self.events)

    def _workload(self) -> Workload:
        workload, models = self.make(), self.workload.models()
        if shared := next(_shared(workload, self.workload), None):
            raise ConfigError(
                f"the program, made a second time, has {shared} of the run's own, which a trial would change: make the "
                "models, optimizers, state and batches inside of the function that gives the Workload"
            )
        for name, model in workload.models().items():
            model.load_state_dict(models[name].state_dict())
        return workload


def _shared(one: Workload, other: Workload) -> Iterator[str]:
    """Name what two programs have in common of what a step, or reading batches, changes."""
    ours, theirs = one.holdings(), other.holdings()
    held = {id(tensor) for tensor in (*theirs.parameters().values(), *theirs.buffers().values())}
    yield from (name for name, tensor in {**ours.parameters(), **ours.buffers()}.items() if id(tensor) in held)
    objects = {id(each) for each in (*theirs.optimizers.values(), *theirs.state)}
    yield from (f"a {type(each).__name__}" for each in (*ours.optimizers.values(), *ours.state) if id(each) in objects)
    generators = {id(each) for each in generators_of(other.batches)}
    used_up = one.batches is other.batches and isinstance(one.batches, Iterator)
    if used_up or any(id(each) in generators for each in generators_of(one.batches)):
        yield "the batches"


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
