"""Copies and compares many tensors in few launches."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_dtype_of = operator.attrgetter("dtype")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in place and without gradients; shapes must match, devices may differ."""
    with torch.no_grad():
        for places in _alike(targets, sources):
            some, theirs = [targets[place] for place in places], [sources[place] for place in places]
            try:
                private("torch:_foreach_copy_")(some, theirs, non_blocking=False)
            except CapabilityMissingError:
                for target, source in zip(some, theirs, strict=True):
                    target.copy_(source)


def differing(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Give the places of tensors that do not hold the same bits as the others; shapes and dtypes are the same.

    Those are among them that cannot be compared (a subclass, no memory), and all on a GPU: to compare thousands there
    takes longer than to write them.
    """
    return [place for place, (one, other) in enumerate(zip(ones, others, strict=True)) if _may_differ(one, other)]


def _may_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    # One that is spread over processes would ask these.
    if type(one) not in (torch.Tensor, torch.nn.Parameter) or one.device.type != "cpu":
        return not one.is_meta
    try:
        return not torch.equal(_bits(one), _bits(other))
    except Exception:  # noqa: BLE001 - not known to be the same
        return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor as integers: NaN is itself, and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.itemsize not in _INTEGERS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])


def copies(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy each tensor into memory of its own, without gradients; dense ones in few launches."""
    if any(one.layout != torch.strided for one in sources):
        return [one.detach().clone() for one in sources]
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for places in _alike(sources):
            some = [sources[place] for place in places]
            try:
                made = private("torch:_foreach_clone")(some)
            except CapabilityMissingError:
                made = [torch.empty_like(one) for one in some]
                copy_all(made, some)
            found.update(zip(places, made, strict=True))
    return [found[place] for place in range(len(sources))]


def _alike(*lists: Sequence[torch.Tensor]) -> Iterable[Sequence[int]]:
    """Give the places of tensors that have type and dtype in common.

    torch takes a list of several dtypes one by one, and makes all of a list what a subclass makes of its own.
    """
    kinds = list(zip(*(each for one in lists for each in (map(_dtype_of, one), map(type, one))), strict=True))
    if len(set(kinds)) <= 1:
        return [range(len(kinds))] if kinds else []
    groups: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    return groups.values()


def norms(tensors: Sequence[torch.Tensor], order: float = 2) -> torch.Tensor:
    """Give the norm of each floating tensor, Euclidean or of another order, of shape [tensors]: infinite on overflow.

    In float32, of tensors in float64 in that. All are on one device, of one dtype, and not empty. In few launches.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    with torch.no_grad():
        try:
            found = private("torch:_foreach_norm")(list(tensors), ord=order, dtype=dtype)
        except CapabilityMissingError:
            found = [torch.linalg.vector_norm(one, order, dtype=dtype) for one in tensors]
        return torch.stack(list(found))


def subtracted(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give each of the first less that of the second; all on one device and of one dtype. In few launches."""
    return _pairwise("torch:_foreach_sub", torch.sub, ones, others)


def multiplied(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Give each of the first times that of the second; all on one device and of one dtype. In few launches."""
    return _pairwise("torch:_foreach_mul", torch.mul, ones, others)


def scaled(tensors: Sequence[torch.Tensor], by: Sequence[float]) -> list[torch.Tensor]:
    """Give each tensor times its number; all on one device and of one dtype. In few launches."""
    return _pairwise("torch:_foreach_mul", torch.mul, tensors, by)


def _pairwise(
    name: str, alone: Callable[..., torch.Tensor], ones: Sequence[torch.Tensor], others: Sequence[Any]
) -> list[torch.Tensor]:
    with torch.no_grad():
        try:
            found: list[torch.Tensor] = list(private(name)(list(ones), list(others)))
        except CapabilityMissingError:
            return [alone(one, other) for one, other in zip(ones, others, strict=True)]
        return found
