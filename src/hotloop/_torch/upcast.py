"""Runs a step in a wider floating dtype than it is written for: what rounding hides in the step itself shows there.

A model that was turned to float64 does not compute in it by itself: its code casts (``x.float()``), autocast casts,
constants come in the default dtype. Below autograd every operation passes here, and each narrower number that it reads
or is asked for becomes a wide one.

Random numbers are drawn in the dtype of the step itself: torch draws other ones in another dtype. Which dtype that was
is noted in an ordinary step, draw by draw. Attention is computed operation by operation, as fused kernels know no
float64, with the masks that the step's own kernel draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from hotloop._torch.attention import FusedDropout, drops_inside, is_told
from hotloop._torch.attention import noted as noted_attention
from hotloop._torch.dispatch import is_random, name_of, observing, tensors_in, written_by
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_DEVICES = ("cpu", "cuda")
_DROPOUT = "aten.native_dropout"
_SINGLE = ("aten._amp_", "aten._fused_")


class NotRepeatableError(Exception):
    """The step cannot be run in a wider dtype; the message says why."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """One operation of a step that drew random numbers, and the dtype it did so in; None for whole numbers.

    ``fused`` is what makes its mask again, where it is attention with a dropout inside.
    """

    operation: str
    dtype: torch.dtype | None
    fused: FusedDropout | None = None


def noting_draws(found: list[Draw]) -> contextlib.AbstractContextManager[Any]:
    """Give a context that adds each draw of a step to a list, in order."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _draws(operation, args, kwargs):
            return operation(*args, **kwargs)
        fused = None
        if drops_inside(operation):
            result, fused = noted_attention(operation, args, kwargs)
        else:
            result = operation(*args, **kwargs)
        tensors = tensors_in(result, *args, *kwargs.values())
        found.append(Draw(name_of(operation), next((t.dtype for t in tensors if t.is_floating_point()), None), fused))
        return result

    return observing(handle)


@contextlib.contextmanager
def widened(dtype: torch.dtype, draws: Sequence[Draw]) -> Iterator[None]:
    """Compute in a floating dtype, or wider, while the block runs: autocast does nothing, compiled code runs eagerly.

    Args:
        dtype: ``torch.float64``, or ``torch.float32`` for steps that compute in fewer bits. torch's default dtype,
            which is the whole process's, is left alone: what is made in the block is widened as it is made.
        draws: what `noting_draws` found in the same step.

    Raises:
        NotRepeatableError: in the block, by an operation that has no wider form or draws differently.
    """
    wide = _Wide(dtype, draws)
    with contextlib.ExitStack() as stack:
        for kind in _DEVICES:
            stack.callback(torch.set_autocast_enabled, kind, torch.is_autocast_enabled(kind))
            torch.set_autocast_enabled(kind, False)
        # What enters autocast in the block asks this function to; all else of it is harmless.
        stack.enter_context(replaced(torch, "set_autocast_enabled", lambda _real: lambda *_args: None))
        stack.enter_context(_exact_products())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(observing(wide.operation))
        yield
    if wide.left:
        raise NotRepeatableError(f"in {_name(dtype)} the step draws random numbers less often")


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, and not in TF32."""
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
    """Runs operations on wide numbers."""

    def __init__(self, dtype: torch.dtype, draws: Iterable[Draw]) -> None:
        self._dtype, self._complex = dtype, torch.promote_types(dtype, torch.complex64)
        self._draws = list(draws)
        self._drawn = 0

    @property
    def left(self) -> int:
        """How many draws have not been repeated."""
        return len(self._draws) - self._drawn

    def operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        if _draws(operation, args, kwargs):
            return self._draw(operation, args, kwargs)
        if name_of(operation).startswith(_SINGLE):
            return self._in_single(operation, args, kwargs)
        written = {id(one) for one in written_by(operation, args, kwargs)}
        if not written and _is_view(operation):
            if any(isinstance(one, torch.dtype) for one in args):
                raise NotRepeatableError(f"the bits of a number are read: {name_of(operation)}")
            return operation(*args, **kwargs)
        args = tuple(self._widen(one, written) for one in args)
        result = operation(*args, **{name: self._widen(one, written) for name, one in kwargs.items()})
        made = isinstance(result, torch.Tensor) and next(tensors_in(*args, *kwargs.values()), None) is None
        return result.to(self._wider(result.dtype)) if made and result.dim() else result

    def _in_single(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation that takes its scales as float32 only: a GradScaler's, a fused optimizer's."""
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        single = {id(one): one.float() for one in given if one.dim() == 0 and one.dtype == torch.float64}
        arguments = [single.get(id(one), one) for one in args]
        result = operation(*arguments, **{name: single.get(id(one), one) for name, one in kwargs.items()})
        for one in written_by(operation, args, kwargs):
            if id(one) in single:
                one.copy_(single[id(one)])
        return result

    def _widen(self, value: Any, written: set[int]) -> Any:
        if isinstance(value, torch.dtype):
            return self._wider(value)
        if isinstance(value, torch.Tensor):
            # Without dimensions it is a number, which torch widens itself; some kernels insist on its dtype.
            keep = value.dim() == 0 or id(value) in written or value.layout != torch.strided
            return value if keep else value.to(self._wider(value.dtype))
        if isinstance(value, list | tuple):
            return type(value)(self._widen(one, written) for one in value)
        return value

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if dtype.is_complex:
            return torch.promote_types(dtype, self._complex)
        return torch.promote_types(dtype, self._dtype) if dtype.is_floating_point else dtype

    def _draw(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw in the dtype that the step itself drew in."""
        name = name_of(operation)
        draw = self._draws[self._drawn] if self.left else None
        if draw is not None and draw.fused is not None and name == _DROPOUT:
            self._drawn += 1
            return _dropped(args[0], self._mask_of(draw.fused, args[0], args[1]), args[1])
        if draw is None or draw.operation != name:
            found = draw.operation if draw is not None else "nothing"
            raise NotRepeatableError(f"in {_name(self._dtype)} the step draws by {name}, as it is by {found}")
        self._drawn += 1
        dtype = draw.dtype
        if dtype is None:
            return operation(*args, **kwargs)
        written = {id(one): one for one in written_by(operation, args, kwargs)}
        narrow = {key: one.to(dtype) if one.is_floating_point() else one for key, one in written.items()}
        asked = {key: _narrowed(one, dtype, narrow) for key, one in kwargs.items()}
        if asked.get("dtype") is None and _takes_dtype(operation):
            asked["dtype"] = dtype
        result = operation(*(_narrowed(one, dtype, narrow) for one in args), **asked)
        if name == _DROPOUT:
            return _dropped(args[0], result[1], args[1])
        for key, one in written.items():
            if narrow[key] is not one:
                one.copy_(narrow[key])
        return self._given_back(result, {id(narrow[key]): one for key, one in written.items()})

    def _mask_of(self, fused: FusedDropout, weights: torch.Tensor, share: float) -> torch.Tensor:
        """Draw the mask that the step's own kernel draws for these weights of attention."""
        why = fused.why or ("" if share == fused.share else f"{share} is dropped, not {fused.share}")
        if why:
            raise NotRepeatableError(f"the dropout of {name_of(fused.operation)} cannot be repeated: {why}")
        return fused.mask(weights.shape, weights.device)

    def _given_back(self, result: Any, live: dict[int, torch.Tensor]) -> Any:
        if isinstance(result, list | tuple):
            return type(result)(self._given_back(one, live) for one in result)
        if not isinstance(result, torch.Tensor):
            return result
        found = live.get(id(result))
        return found if found is not None else result.to(self._wider(result.dtype))


def _narrowed(value: Any, dtype: torch.dtype, narrow: dict[int, torch.Tensor]) -> Any:
    """Give an argument of a draw in the dtype to draw in; for one that is written, what is written in its place."""
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    found = narrow.get(id(value))
    return found if found is not None else value.to(dtype)


def _dropped(values: torch.Tensor, mask: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Give what a dropout makes of wide values, for a mask that was drawn."""
    return values * mask * (0.0 if p >= 1 else 1 / (1 - p)), mask


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation draws random numbers in this call: fused attention without dropout does not."""
    if not is_random(operation) or is_told(operation):
        return False
    names = [one.name for one in operation._schema.arguments]  # noqa: SLF001 - in the ledger
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return "dropout_p" not in names or given.get("dropout_p", 0.0) > 0


def _takes_dtype(operation: Any) -> bool:
    return any(one.name == "dtype" for one in operation._schema.arguments)  # noqa: SLF001 - in the ledger


def _is_view(operation: Any) -> bool:
    """Tell whether an operation gives a view of an argument, by its schema."""
    return any(one.alias_info is not None for one in operation._schema.returns)  # noqa: SLF001 - in the ledger


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
