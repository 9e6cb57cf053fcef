"""What a step pays beside its model: the wait for its batch, the set-up for a new shape, an optimizer's slow form."""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotloop.measure import interval, signature
from hotloop.prove.doctor.pairs import timed_pair
from hotloop.step.workload import arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.workload import Workload


def data_wait(workload: Workload, batches: Iterator[Any], run: Callable[[Any], None], steps: int) -> dict[str, Any]:
    """Run steps one after another, and return what of their time went by until their batch was there.

    Workers load while a step runs, so only what the step had to wait for counts. The mean counts, not the median: of
    four workers that are too slow, every fourth batch is late.

    Args:
        workload: whose batches are read.
        batches: its batches, without an end.
        run: runs a step to its end.
        steps: to run.

    Returns:
        ``data_wait_ms`` and ``data_step_ms``, means a step; and ``data_workers``, for a DataLoader. Empty where the
        batches are a list, which nothing waits for, or an iterator, which would be used up.
    """
    given = workload.batches
    if isinstance(given, Iterator) or (isinstance(given, Sequence) and workload.before is None):
        return {}
    waited, ran = [], []
    run(next(batches))  # workers that still begin are no part of it
    for _ in range(steps):
        began = time.perf_counter()
        batch = next(batches)
        there = time.perf_counter()
        run(batch)
        waited.append(there - began)
        ran.append(time.perf_counter() - there)
    found = {"data_wait_ms": 1e3 * sum(waited) / steps, "data_step_ms": 1e3 * sum(ran) / steps}
    return found | ({"data_workers": given.num_workers} if isinstance(given, DataLoader) else {})


def new_shapes(
    workload: Workload, batches: Iterator[Any], run: Callable[[Any], None], steps: int, known: set[Any]
) -> dict[str, Any]:
    """Run each batch of a new shape twice, and return by how much the first time took longer.

    The same batch is run again at once, so nothing but the set-up for its shape differs: libraries choose kernels and
    plans for a shape when they first meet it, and torch's allocator asks the device for blocks of new sizes.

    Args:
        workload: whose batches are read.
        batches: its batches, without an end.
        run: runs a step to its end.
        steps: batches to look at; those of a known shape are not run.
        known: signatures of the steps that ran already; new ones are added.

    Returns:
        ``steps``, ``shapes`` (new ones), ``extra_seconds`` of all of them, and ``extra_ms`` of a typical one with its
        interval. Empty where too few shapes are new to tell, or where the batches are an iterator.
    """
    if isinstance(workload.batches, Iterator):
        return {}
    extra = []
    for _ in range(steps):
        batch = next(batches)
        inputs = signature(arguments(batch), {})
        if inputs in known:
            continue
        known.add(inputs)
        first, again = (_seconds(run, batch) for _ in range(2))
        extra.append(first - again)
    low, high = interval(extra) if extra else (-math.inf, math.inf)
    if not math.isfinite(low):
        return {}
    figures = {"extra_ms": statistics.median(extra), "extra_ms_low": low, "extra_ms_high": high}
    return {
        "steps": steps,
        "shapes": len(extra),
        "extra_seconds": sum(extra),
        **{name: 1e3 * value for name, value in figures.items()},
    }


def _seconds(run: Callable[[Any], None], batch: Any) -> float:
    began = time.perf_counter()
    run(batch)
    return time.perf_counter() - began


def fused_optimizers(workload: Workload, wait: Callable[[], None]) -> list[dict[str, Any]]:
    """Time the optimizers that have a fused form and do not use it, as they are and fused, on copied parameters.

    Returns:
        for each: ``name``, ``step_ms``, ``step_ms_low``, ``step_ms_high`` of its step alone, and the same of the fused
        one after ``fused_``. Those whose parameters torch fuses no step for, or finds no memory for, are left out.
    """
    found = []
    for optimizer in workload.holdings().optimizers.values():
        try:
            pair = [_copy(optimizer, fused=fused) for fused in (False, True)] if _may_fuse(optimizer) else []
            figures = timed_pair([one.step for one in pair], wait, "fused_") if pair else {}
        except (RuntimeError, ValueError):  # torch's refusals, and no memory: the optimizer stays as it is
            continue
        if figures:
            found.append({"name": type(optimizer).__name__, **figures})
    return found


def _may_fuse(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if kind.__module__.partition(".")[0] != "torch" or "fused" not in inspect.signature(kind).parameters:
        return False
    groups = optimizer.param_groups
    return not any(group.get("fused") or group.get("differentiable") for group in groups)


def _copy(optimizer: torch.optim.Optimizer, *, fused: bool) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings, or fused, on copies of the parameters that have gradients."""
    groups = []
    for group in optimizer.param_groups:
        trained = [one for one in group["params"] if one.requires_grad]
        copies = [torch.nn.Parameter(one.detach().clone()) for one in trained]
        for copy in copies:
            copy.grad = torch.full_like(copy, 1e-4)
        asked = {"fused": True, "foreach": False} if fused else {}
        groups.append({**group, **asked, "params": copies})
    names = inspect.signature(type(optimizer)).parameters
    return type(optimizer)(groups, **{name: value for name, value in optimizer.defaults.items() if name in names})
