"""One step in a wider dtype, from the same state on the same batch: eager and a tier are both compared with it.

The program is not copied. Parameters, buffers, gradients and optimizer state are bound to wide copies of themselves,
the step runs, and the tensors from before come back as they were, in the same memory.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import module_tables
from hotloop._torch.upcast import Draw, NotRepeatableError, recording_draws, widened
from hotloop.errors import describe
from hotloop.measure import flatten, unflatten
from hotloop.measure.machine import free_bytes
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import OF_COMPILED, kind_of
from hotloop.step.state.snapshot import Snapshot, remembered_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hotloop.step.state.holdings import Holdings
    from hotloop.step.state.program import Call, Program

_log = logging.getLogger("hotloop")
_COUNT = "step"
"""An optimizer's count of its steps: fused kernels need it in float32, and only powers are computed from it."""


def wider_dtypes(compute_dtype: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that can judge a step's compute dtype, widest first: float64, and float32 if that is wider."""
    if compute_dtype == "float64":
        return ()
    return (torch.float64,) if compute_dtype == "float32" else (torch.float64, torch.float32)


def draws_of(program: Program, call: Call) -> list[Draw]:
    """Run a step in its own dtype and undo it; return the random draws that it made.

    Raises:
        hotloop.step.obstacle.CandidateFailedError: the step raised; the state is as before.
    """
    draws: list[Draw] = []

    def run() -> Any:
        with recording_draws(draws):
            return proof.plain_run(program.holdings, lambda: program.step(*call[0], **call[1]))

    proof.run_and_undo(program, run)
    return draws


def step_in_first(
    program: Program, call: Call, dtypes: list[torch.dtype], draws: Sequence[Draw]
) -> tuple[dict[str, torch.Tensor | None] | None, str]:
    """Run a step in the first of some dtypes that it runs in, and undo it.

    Args:
        program: the program that the step changes.
        call: the step's arguments.
        dtypes: the dtypes to try, in this order. Those that the step does not run in are removed from the list.
        draws: the random draws of the same step in its own dtype.

    Returns:
        the values of `wide_step`, None if the step runs in none of the dtypes; and why the last of the removed dtypes
        was removed, after its name.

    Raises:
        hotloop.step.obstacle.CandidateFailedError: a run could not be undone.
    """
    why = ""
    while dtypes:
        try:
            return wide_step(program, call, dtypes[0], draws), why
        except NotRepeatableError as error:
            why = f"{str(dtypes.pop(0)).removeprefix('torch.')}: {error}"
            _log.info("a step is not run in more bits, in %s", why)
    return None, why


def wide_step(
    program: Program, call: Call, dtype: torch.dtype, draws: Sequence[Draw]
) -> dict[str, torch.Tensor | None]:
    """Run a step in a wide dtype and undo it; return its values by the names of a proof, parameters as their updates.

    Args:
        program: the program that the step changes.
        call: the step's arguments.
        dtype: the dtype to compute in.
        draws: the random draws of the same step in its own dtype.

    Raises:
        NotRepeatableError: it cannot be run so: memory, an operation without that dtype, other random numbers.
        hotloop.step.obstacle.CandidateFailedError: it could not be undone.
    """
    if why := too_large(program, dtype):
        raise NotRepeatableError(why)
    try:
        before = Snapshot(program, everything=False, gradients=False)
        forget_state = remembered_of(program.holdings)  # which an optimizer's first step makes, wide
    except Exception as error:
        raise NotRepeatableError(f"what it changes cannot be copied: {describe(error)}") from error
    try:
        with _bound(program.holdings, dtype) as starts:
            made = _run(program, call, dtype, draws)
            return {
                name: value - starts[name] if value is not None and name in starts else value
                for name, value in made.items()
            }
    except NotRepeatableError:
        raise
    except Exception as error:
        raise NotRepeatableError(
            f"the step does not run in {str(dtype).removeprefix('torch.')}: {describe(error)}"
        ) from error
    finally:
        try:
            before.restore()
            forget_state()
        except Exception as error:
            raise CandidateFailedError(undone=False) from error


def _run(program: Program, call: Call, dtype: torch.dtype, draws: Sequence[Draw]) -> dict[str, torch.Tensor | None]:
    leaves, structure = flatten(call)
    wide = [_Copies.widen(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = unflatten(structure, wide)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about wide tensors (RNN weights in pieces) mislead a user
        with widened(dtype, draws):
            result, at_step = proof.plain_run(program.holdings, lambda: program.step(*args, **kwargs))
    made = proof.values_of(program.holdings, result, at_step)
    # Optimizer state is judged by the updates that come of it: a copy would take twice the model's memory.
    made = {name: value for name, value in made.items() if kind_of(name) in (*OF_COMPILED, "parameter")}
    # Copied, since gradients may be changed in place after the optimizer's step, and buffers go back with the block.
    return {name: None if value is None else value.detach().clone() for name, value in made.items()}


@contextlib.contextmanager
def _bound(holdings: Holdings, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Bind every floating tensor to a wide copy; yield copies of the parameters' values by the names of a proof."""
    parameters = holdings.parameters()
    before = [(parameter, parameter.data, parameter.grad) for parameter in parameters.values()]
    tables = [module_tables(part)[1] for root in holdings.modules.values() for part in root.modules()]
    buffers = [(table, dict(table)) for table in tables if table]
    states = [entry for one in holdings.optimizers.values() for entry in one.state.values() if isinstance(entry, dict)]
    entries = [(entry, dict(entry)) for entry in states]
    counts = [(entry, entry[_COUNT]) for entry in states if isinstance(entry.get(_COUNT), torch.Tensor)]
    copies = _Copies(dtype)
    try:
        for parameter, value, gradient in before:
            parameter.grad = None
            parameter.data = copies.of(value)
            parameter.grad = None if gradient is None else copies.of(gradient)
        for table, held in (*buffers, *entries):
            tensors = {key: value for key, value in held.items() if isinstance(value, torch.Tensor) and key != _COUNT}
            table.update({key: copies.of(value) for key, value in tensors.items()})
        for entry, count in counts:
            entry[_COUNT] = count.clone()
        yield {f"parameter {name}": parameter.detach().clone() for name, parameter in parameters.items()}
    finally:
        for parameter, value, gradient in before:
            parameter.grad = None
            parameter.data = value
            parameter.grad = gradient
        for table, held in (*buffers, *entries):
            table.clear()
            table.update(held)


class _Copies:
    """Wide copies of tensors; copies of tensors that share memory share memory, too."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the wide copy of a tensor; a tensor without floating numbers keeps its dtype."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise NotRepeatableError(f"a {type(tensor).__name__} of layout {tensor.layout} is among its tensors")
        if tensor.is_conj() or tensor.is_neg():
            raise NotRepeatableError("a conjugate or negative view is among its tensors")
        storage = tensor.untyped_storage()
        key = (storage.data_ptr(), tensor.dtype)
        if key not in self._memory or not storage.data_ptr():
            flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            self._memory[key] = self.widen(flat.clone(), self._dtype)
        return self._memory[key].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    @staticmethod
    def widen(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Convert a tensor of floating or complex numbers to a dtype at least as wide as ``dtype``."""
        if tensor.is_complex():
            return tensor.to(torch.promote_types(tensor.dtype, torch.promote_types(dtype, torch.complex64)))
        return tensor.to(torch.promote_types(tensor.dtype, dtype)) if tensor.is_floating_point() else tensor


def too_large(program: Program, dtype: torch.dtype) -> str:
    """Return why a wide step would not fit in memory; empty if it fits, as far as that can be estimated."""
    holdings, device = program.holdings, program.device
    tensors = [*holdings.tensors().values(), *(one for one in holdings.gradients().values() if one is not None)]
    trained = [parameter for parameter in holdings.parameters().values() if parameter.requires_grad]
    needed = sum(tensor.numel() * dtype.itemsize for tensor in tensors if tensor.is_floating_point())
    needed += sum(parameter.numel() * dtype.itemsize for parameter in trained)  # gradients that the step makes
    needed = int(1.5 * needed)  # a margin for the tensors in between, whose size is not known before
    if device.type == "cuda":  # activations, by the highest use of the GPU so far
        beside = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        narrowest = min(torch.get_autocast_dtype("cuda").itemsize, torch.float32.itemsize)
        needed += beside * dtype.itemsize // narrowest
    free = free_bytes(device)
    if free is None or needed <= free:
        return ""
    gib = 2**30
    return f"{str(dtype).removeprefix('torch.')} needs about {needed / gib:.1f} GiB, and {free / gib:.1f} GiB are free"
