"""What a step pays outside of its model: the wait for its batch, and an optimizer that is not the fused one."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from hotloop.measure import interval, typical

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.step.workload import Workload

_WARM_UP, _ROUNDS = 3, 12


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
            figures = _timed(pair, wait) if pair else {}
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


def _timed(pair: Sequence[torch.optim.Optimizer], wait: Callable[[], None]) -> dict[str, float]:
    """Time two optimizers by turns, so that other load on the machine meets both."""
    samples: list[list[float]] = [[], []]
    for turn in range(_WARM_UP + _ROUNDS):
        for optimizer, taken in zip(pair, samples, strict=True):
            wait()
            began = time.perf_counter()
            optimizer.step()
            wait()
            if turn >= _WARM_UP:
                taken.append(time.perf_counter() - began)
    figures: dict[str, float] = {}
    for prefix, taken in zip(("", "fused_"), samples, strict=True):
        low, high = interval(taken)
        named = {"step_ms": typical(taken, skip=0), "step_ms_low": low, "step_ms_high": high}
        figures |= {prefix + name: 1e3 * value for name, value in named.items()}
    return figures
