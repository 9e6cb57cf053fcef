"""The workloads of bench, verify and harness: each way to run gets its own, made anew from the same seed.

A workload that trains nothing is refused: its steps would agree with each other whatever compiled code does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError
from hotloop._torch.own_compiles import uncompiled
from hotloop._torch.settings import patched
from hotloop.errors import ConfigError
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.workload import Workload, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.state.holdings import Holdings

SEED = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """Makes a workload for each way to run.

    Args:
        make: makes a new workload.
        name: by which another process can make it, ``file.py:function`` or ``module:function``; empty if none can.
        why: why there is no name.
    """

    make: Callable[[], Workload]
    name: str = ""
    why: str = ""


def source_of(given: Any) -> Source:
    """Return the source for a workload, a function that makes one, or the name of such a function.

    Raises:
        ConfigError: the argument is none of them, or a workload that cannot be copied.
    """
    if isinstance(given, str):
        place, _, function = given.rpartition(":")
        name = f"{Path(place).resolve()}:{function}" if place.endswith(".py") else given
        return Source(load_factory(given), name=name)
    if isinstance(given, Workload):
        return Source(_copies_of(given), why="a Workload that exists in this process only")
    if not callable(given):
        raise ConfigError(
            f"workload {given!r}: expected a hotloop.Workload, a function that makes one, or its name as 'file.py:make'"
        )

    def make() -> Workload:
        made = given()
        if not isinstance(made, Workload):
            raise ConfigError(f"workload {_name_of(given)}() gave a {type(made).__name__}, expected a hotloop.Workload")
        return made

    name = _importable(given)
    why = "" if name else f"{_name_of(given)} cannot be imported by another process: no function of a file's own"
    return Source(make, name, why)


def _copies_of(workload: Workload) -> Callable[[], Workload]:
    """Return a function that copies a workload as it is now: its model, optimizer and step together.

    Raises:
        ConfigError: the step is a function over this very model, so that a copy of the workload would train it.
    """
    first = _copied(workload)
    if first.step is workload.step:
        raise ConfigError(
            f"workload step {_name_of(workload.step)}: it works on this one model, and each way needs its own; give "
            "the function that makes the workload, hotloop.bench(make), or its name, hotloop.bench('file.py:make')"
        )
    return lambda: _copied(first)


def _copied(workload: Workload) -> Workload:
    memo: dict[int, Any] = {}
    if not callable(workload.batches):
        memo[id(workload.batches)] = workload.batches  # batches are read only, and a loader's workers cannot be copied
    try:
        return copy.deepcopy(workload, memo)
    except Exception as error:
        raise ConfigError(
            f"workload: it cannot be copied ({type(error).__name__}: {error}), and each way needs one of its own; give "
            "the function that makes it, hotloop.bench(make), or its name, hotloop.bench('file.py:make')"
        ) from error


def _importable(function: Any) -> str:
    """Return the name by which another process can import a function; empty if it cannot."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module not in sys.modules or not name.isidentifier() or getattr(sys.modules[module], name, None) is not function:
        return ""
    if module == "__main__":
        file = getattr(sys.modules[module], "__file__", None)
        return f"{Path(file).resolve()}:{name}" if file and file.endswith(".py") else ""
    try:
        return f"{module}:{name}" if importlib.util.find_spec(module) is not None else ""
    except (ImportError, ValueError):
        return ""


def _name_of(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Start the block from the same random numbers each time, and restore the caller's afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def same_random_numbers() -> Iterator[None]:
    """Make compiled code draw the random numbers of eager in the block, even where a preset takes no options."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(CapabilityMissingError):  # without Inductor no code draws other numbers
            stack.enter_context(patched("torch._inductor:config", fallback_random=True))
        yield


def survey_training(
    holdings: Holdings,
    device: torch.device,
    inputs: list[torch.Tensor],
    step: Callable[[], Any],
    again: Callable[[], Any],
) -> AuditFindings:
    """Run an eager step, and return its survey; refuse a workload that trains nothing.

    Training is a backward that reaches a parameter, or a step that changes something: some update by hand.

    Args:
        holdings: everything that the step may change.
        device: where the step runs.
        inputs: the tensors of the step's batch.
        step: runs the step.
        again: runs a further step; called only if the backward of the first reached no parameter.

    Raises:
        ConfigError: the step trains nothing.
    """
    reached: set[int] = set()

    def note(parameter: torch.Tensor) -> None:
        reached.add(id(parameter))

    # A hook of each parameter sees the backward even if the optimizer skips its step.
    trained = [parameter for parameter in holdings.parameters().values() if parameter.requires_grad]
    handles = [parameter.register_post_accumulate_grad_hook(note) for parameter in trained]  # type: ignore[no-untyped-call]
    try:
        with uncompiled():  # of compiled code nobody sees what it writes
            _, seen = trace_step(holdings, device, inputs, step)
    finally:
        for handle in handles:
            handle.remove()
    if reached:
        return seen
    before = {name: tensor.clone() for name, tensor in holdings.tensors().items()}
    again()
    if all(torch.equal(tensor, before[name]) for name, tensor in holdings.tensors().items() if name in before):
        raise ConfigError(
            "Workload step: it gave no parameter a gradient and changed nothing, so there is no training to judge: "
            "expected the whole step, with loss.backward() and optimizer.step()"
        )
    return seen
