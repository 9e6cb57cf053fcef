"""Runs a step in a wider floating dtype than it is written for, which shows what rounding hides in the step itself.

A model in float64 does not compute in float64 by itself: its code casts (``x.float()``), autocast casts, constants come
in the default dtype. Below autograd every operation passes here, and each narrower number that it reads or is asked for
becomes a wide number.

Random numbers are drawn in the dtype of the step itself, since torch draws other numbers in another dtype. The dtype of
each draw is recorded in an ordinary step. Attention is computed operation by operation, since fused kernels know no
float64: a step whose fused attention drops weights, and never shows which, cannot be repeated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop._torch.dispatch import (
    argument_names,
    draws_random,
    is_higher_order,
    name_of,
    observing,
    tensors_in,
    written_by,
)
from hotloop._torch.own_compiles import uncompiled
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class NotRepeatableError(Exception):
    """The step cannot be run in a wider dtype; the message says why."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """An operation of a step that drew random numbers, and the dtype that it drew in; None for whole numbers."""

    operation: str
    dtype: torch.dtype | None


def recording_draws(found: list[Draw]) -> contextlib.AbstractContextManager[Any]:
    """Return a context that adds each draw of a step to a list, in order."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _draws(operation, args, kwargs):
            return operation(*args, **kwargs)
        result = operation(*args, **kwargs)
        tensors = tensors_in(result, *args, *kwargs.values())
        found.append(Draw(name_of(operation), next((t.dtype for t in tensors if t.is_floating_point()), None)))
        return result

    return observing(handle)


@contextlib.contextmanager
def widened(dtype: torch.dtype, draws: Sequence[Draw]) -> Iterator[None]:
    """Compute in a floating dtype, or wider, while the block runs: autocast does nothing, compiled code runs eagerly.

    Args:
        dtype: ``torch.float64``, or ``torch.float32`` for steps that compute in fewer bits. torch's default dtype,
            which is the whole process's, stays: new tensors in the block are widened as they are made.
        draws: what `recording_draws` found in the same step.

    Raises:
        NotRepeatableError: in the block, by an operation that has no wider form or draws differently.
    """
    wide = _Wide(dtype, draws)
    with contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        # Autocast that is entered in the block calls this function; everything else that it does is harmless.
        stack.enter_context(replaced(torch, "set_autocast_enabled", lambda _real: lambda *_args: None))
        stack.enter_context(_exact_products())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(uncompiled(attention=True))
        stack.enter_context(observing(wide.operation))
        yield
    if wide.left:
        raise NotRepeatableError(f"in {wide.name} the step draws random numbers less often")


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, and not in TF32, while the block runs."""
    backends: Any = torch.backends  # the types that torch ships do not know these settings
    places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn) if torch.cuda.is_available() else ()
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


class _Wide:
    """Runner of operations on wide numbers."""

    def __init__(self, dtype: torch.dtype, draws: Iterable[Draw]) -> None:
        self._dtype, self._complex = dtype, torch.promote_types(dtype, torch.complex64)
        self._draws = list(draws)
        self._drawn = 0
        self.name = str(dtype).removeprefix("torch.")

    @property
    def left(self) -> int:
        """How many draws have not been repeated."""
        return len(self._draws) - self._drawn

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        if is_higher_order(operation):
            raise NotRepeatableError(f"torch.{operation.name()} has no form in {self.name}")
        if _draws(operation, args, kwargs):
            return self._draw(operation, args, kwargs)
        if name_of(operation).startswith(("aten._amp_", "aten._fused_")):
            return self._in_single(operation, args, kwargs)
        written = {id(tensor) for tensor in written_by(operation, args, kwargs)}
        makes_view = any(result.alias_info is not None for result in operation._schema.returns)  # noqa: SLF001 - in the ledger
        if not written and makes_view:
            if any(isinstance(value, torch.dtype) for value in args):
                raise NotRepeatableError(f"the bits of a number are read: {name_of(operation)}")
            return operation(*args, **kwargs)
        args = tuple(self._widen(value, written) for value in args)
        result = operation(*args, **{name: self._widen(value, written) for name, value in kwargs.items()})
        made = isinstance(result, torch.Tensor) and next(tensors_in(*args, *kwargs.values()), None) is None
        return result.to(self._wider(result.dtype)) if made and result.dim() else result

    def _in_single(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that takes its scales only as float32: a GradScaler's, a fused optimizer's."""
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        single = {id(scale): scale.float() for scale in given if scale.dim() == 0 and scale.dtype == torch.float64}
        arguments = [single.get(id(value), value) for value in args]
        result = operation(*arguments, **{name: single.get(id(value), value) for name, value in kwargs.items()})
        for tensor in written_by(operation, args, kwargs):
            if id(tensor) in single:
                tensor.copy_(single[id(tensor)])
        return result

    def _widen(self, value: Any, written: set[int]) -> Any:
        if isinstance(value, torch.dtype):
            return self._wider(value)
        if isinstance(value, torch.Tensor):
            # A tensor without dimensions is a number, which torch widens itself; some kernels insist on its dtype.
            keep = value.dim() == 0 or id(value) in written or value.layout != torch.strided
            return value if keep else value.to(self._wider(value.dtype))
        if isinstance(value, list | tuple):
            return type(value)(self._widen(item, written) for item in value)
        return value

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            return torch.promote_types(dtype, self._complex)
        return torch.promote_types(dtype, self._dtype) if dtype.is_floating_point else dtype

    def _draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw in the dtype that the step itself drew in."""
        name = name_of(operation)
        draw = self._draws[self._drawn] if self.left else None
        is_dropout = name == "aten.native_dropout"
        if draw is None or draw.operation != name:
            found = draw.operation if draw is not None else "nothing"
            raise NotRepeatableError(f"in {self.name} the step draws by {name}, as it is by {found}")
        self._drawn += 1
        dtype = draw.dtype
        if dtype is None:
            return operation(*args, **kwargs)
        written = {id(tensor): tensor for tensor in written_by(operation, args, kwargs)}
        narrow = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in written.items()}
        asked = {key: self._narrowed(value, dtype, narrow) for key, value in kwargs.items()}
        if asked.get("dtype") is None and "dtype" in argument_names(operation):
            asked["dtype"] = dtype
        result = operation(*(self._narrowed(value, dtype, narrow) for value in args), **asked)
        if is_dropout:
            return self._dropped(args[0], result[1], args[1])
        for key, tensor in written.items():
            if narrow[key] is not tensor:
                tensor.copy_(narrow[key])
        return self._widened_result(result, {id(narrow[key]): tensor for key, tensor in written.items()})

    def _widened_result(self, result: Any, live: dict[int, torch.Tensor]) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._widened_result(item, live) for item in result)
        if not isinstance(result, torch.Tensor):
            return result
        found = live.get(id(result))
        return found if found is not None else result.to(self._wider(result.dtype))

    @staticmethod
    def _narrowed(value: Any, dtype: torch.dtype, narrow: dict[int, torch.Tensor]) -> Any:
        """Return an argument of a draw in the dtype to draw in; a tensor that is written, as its narrow copy."""
        if isinstance(value, torch.dtype):
            return dtype if value.is_floating_point else value
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        found = narrow.get(id(value))
        return found if found is not None else value.to(dtype)

    @staticmethod
    def _dropped(values: torch.Tensor, mask: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply a dropout mask to wide values."""
        return values * mask * (0.0 if p >= 1 else 1 / (1 - p)), mask


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operation draws random numbers in this call.

    Attention's backward does not, which torch calls random all the same: it gets a random position as an argument.
    """
    return "philox_seed" not in argument_names(operation) and draws_random(operation, args, kwargs)
