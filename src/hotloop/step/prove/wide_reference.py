"""One step in a wider dtype, from the same state on the same batch: what eager and a tier are both held against.

The program is not copied. Parameters, buffers, gradients and optimizer state are bound to wide copies of themselves,
the step runs, and the tensors that were there before come back as they were, in the memory where they were.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import module_tables
from hotloop._torch.upcast import Draw, NotRepeatableError, noting_draws, widened
from hotloop.compiling.fallback.causes import describe
from hotloop.measure import flatten, unflatten
from hotloop.measure.machine import free_bytes
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof
from hotloop.step.state.snapshot import Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.step.state.holdings import Holdings
    from hotloop.step.state.program import Program

__all__ = ["Draw", "NotRepeatableError", "candidates", "noting_draws", "wide_step"]

_COUNT = "step"
"""An optimizer's count of its steps: fused kernels want it in float32, and nothing is computed from it but powers."""
_SPARE = 1.5
"""How much more than its tensors a wide step is taken to need: what lies between them is not known before."""


def candidates(compute_dtype: str) -> tuple[torch.dtype, ...]:
    """Give the dtypes that can judge a step which computes in one: float64, and float32 where that is wider, too."""
    if compute_dtype == "float64":
        return ()
    return (torch.float64,) if compute_dtype == "float32" else (torch.float64, torch.float32)


def wide_step(
    program: Program, call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype, draws: Sequence[Draw]
) -> dict[str, torch.Tensor | None]:
    """Run a step in a wide dtype and undo it; gives what it made by the names of a proof, parameters as their updates.

    Args:
        program: what the step changes.
        call: the step's arguments.
        dtype: what to compute in.
        draws: the random draws of this step as it is.

    Raises:
        NotRepeatableError: it cannot be run so: memory, an operation without that dtype, other random numbers.
        hotloop.step.obstacle.CandidateFailedError: it could not be undone.
    """
    if why := too_large(program, dtype):
        raise NotRepeatableError(why)
    try:
        kept = Snapshot(program, everything=False, gradients=False)
    except Exception as error:
        raise NotRepeatableError(f"what it changes cannot be copied: {describe(error)}") from error
    try:
        with _bound(program.holdings, dtype) as starts:
            made = _run(program, call, dtype, draws)
            found = {
                name: one - starts[name] if one is not None and name in starts else one for name, one in made.items()
            }
    except NotRepeatableError:
        raise
    except Exception as error:
        raise NotRepeatableError(f"the step does not run in {_name(dtype)}: {describe(error)}") from error
    finally:
        _undo(kept)
    return found


def _undo(kept: Snapshot) -> None:
    try:
        kept.restore()
    except Exception as error:
        raise CandidateFailedError(undone=False) from error


def _run(
    program: Program, call: tuple[tuple[Any, ...], dict[str, Any]], dtype: torch.dtype, draws: Sequence[Draw]
) -> dict[str, torch.Tensor | None]:
    leaves, structure = flatten(call)
    args, kwargs = unflatten(structure, [_wide(one, dtype) if isinstance(one, torch.Tensor) else one for one in leaves])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of wide tensors (RNN weights in pieces) is no news to a user
        with widened(dtype, draws):
            result, at_step = proof.plain_run(program.holdings, lambda: program.step(*args, **kwargs))
    made = proof.values_of(program.holdings, result, at_step)
    # Gradients as the optimizer found them may be changed in place after its step; buffers go back with the block.
    return {name: one if one is None else one.detach().clone() for name, one in made.items()}


@contextlib.contextmanager
def _bound(holdings: Holdings, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Bind everything floating to wide copies; gives the copies of the parameters' values by the names of a proof."""
    parameters = holdings.parameters()
    before = {name: (one, one.data, one.grad) for name, one in parameters.items()}
    tables = [module_tables(part)[1] for root in holdings.modules.values() for part in root.modules()]
    buffers = [(table, dict(table)) for table in tables if table]
    states = [entry for one in holdings.optimizers.values() for entry in one.state.values() if isinstance(entry, dict)]
    entries = [(entry, dict(entry)) for entry in states]
    counts = [(entry, entry[_COUNT]) for entry in states if isinstance(entry.get(_COUNT), torch.Tensor)]
    copies = _Copies(dtype)
    try:
        for parameter, value, gradient in before.values():
            parameter.grad = None
            parameter.data = copies.of(value)
            parameter.grad = None if gradient is None else copies.of(gradient)
        for table, held in (*buffers, *entries):
            tensors = {key: one for key, one in held.items() if isinstance(one, torch.Tensor) and key != _COUNT}
            table.update({key: copies.of(one) for key, one in tensors.items()})
        for entry, count in counts:
            entry[_COUNT] = count.clone()
        yield {f"parameter {name}": parameter.detach().clone() for name, parameter in parameters.items()}
    finally:
        for parameter, value, gradient in before.values():
            parameter.grad = None
            parameter.data = value
            parameter.grad = gradient
        for table, held in (*buffers, *entries):
            table.clear()
            table.update(held)


class _Copies:
    """Wide copies of tensors; those that share memory share the copy's."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the copy of a tensor: of the same dtype where it holds no floating numbers."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise NotRepeatableError(f"a {type(tensor).__name__} of layout {tensor.layout} is among its tensors")
        if tensor.is_conj() or tensor.is_neg():
            raise NotRepeatableError("a conjugate or negative view is among its tensors")
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in self._memory or not storage.data_ptr():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._memory[key] = _wide(flat.clone(), self._dtype)
        return self._memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _wide(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.to(torch.promote_types(tensor.dtype, torch.promote_types(dtype, torch.complex64)))
    return tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor


def too_large(program: Program, dtype: torch.dtype) -> str:
    """Say why a wide step would not fit in memory; empty where it does, as far as that can be told."""
    holdings = program.holdings
    tensors = [*holdings.tensors().values(), *(one for one in holdings.gradients().values() if one is not None)]
    trained = [one for one in holdings.parameters().values() if one.requires_grad]
    needed = sum(one.numel() * dtype.itemsize for one in tensors if one.is_floating_point())
    needed += sum(one.numel() * dtype.itemsize for one in trained)  # gradients that the step makes
    needed = int(_SPARE * needed) + _activations(program, dtype)
    free = free_bytes(program.device)
    if free is None or needed <= free:
        return ""
    gib = 2**30
    return f"{_name(dtype)} needs about {needed / gib:.1f} GiB, and {free / gib:.1f} GiB are free"


def _activations(program: Program, dtype: torch.dtype) -> int:
    """Estimate what a step needs beside what it holds, by its highest use of the GPU so far."""
    device = program.device
    if device.type != "cuda":
        return 0
    beside = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    narrowest = min((one.itemsize for one in (torch.get_autocast_dtype("cuda"), torch.float32)), default=4)
    return beside * dtype.itemsize // narrowest


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
