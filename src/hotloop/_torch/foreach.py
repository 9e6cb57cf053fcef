"""Copies and compares many tensors in few launches."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private_or
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_EXACT = (torch.float32, torch.float64)
"""Types to which a weight of 32 bits is converted without loss."""


@contextlib.contextmanager
def weighed_on_device(kind: type[torch.Tensor]) -> Iterator[None]:
    """Let averages in the block take weights of a class as tensors, where torch would read a number on the host."""

    def make(real: Callable[..., Any]) -> Callable[..., Any]:
        def lerp(averaged: Any, current: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(weight, kind) and all(one.dtype in _EXACT for one in averaged):
                weight = [weight.as_subclass(torch.Tensor).to(averaged[0].dtype)] * len(averaged)
            return real(averaged, current, weight, *args, **kwargs)

        return lerp

    known = private_or("torch:_foreach_lerp_", None) is not None
    with replaced(torch, "_foreach_lerp_", make) if known else contextlib.nullcontext():
        yield


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in place and without gradients; shapes must match, devices may differ."""
    copy: Callable[..., None] | None = private_or("torch:_foreach_copy_", None)
    with torch.no_grad():
        for places in _by_kind(targets, sources):
            into, out_of = [targets[place] for place in places], [sources[place] for place in places]
            if copy is not None:
                copy(into, out_of, non_blocking=False)
            else:
                for target, source in zip(into, out_of, strict=True):
                    target.copy_(source)


def differing(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of tensors that do not hold the same bits as the others; shapes and dtypes are the same.

    Tensors that cannot be compared (a subclass, no memory) count as differing. So do all tensors on a GPU: comparing
    thousands of them there takes longer than writing them.
    """
    return [place for place, pair in enumerate(zip(ones, others, strict=True)) if _may_differ(*pair)]


def _may_differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A tensor that is spread over processes would ask the other processes.
    if type(one) not in (torch.Tensor, torch.nn.Parameter) or one.device.type != "cpu":
        return not one.is_meta
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sides = []
    try:
        for tensor in (one, other):
            plain = tensor.detach().resolve_conj().resolve_neg()
            if plain.itemsize not in integers:
                plain = torch.view_as_real(plain)
            sides.append(plain.view(integers[plain.itemsize]))  # as integers NaN is itself, and -0.0 is not 0.0
        return not torch.equal(*sides)
    except Exception:  # noqa: BLE001 - not known to be the same
        return True


def copies(sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy each tensor into memory of its own, without gradients; dense tensors in few launches."""
    if any(source.layout != torch.strided for source in sources):
        return [source.detach().clone() for source in sources]
    clone: Callable[..., list[torch.Tensor]] | None = private_or("torch:_foreach_clone", None)
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for places in _by_kind(sources):
            some = [sources[place] for place in places]
            if clone is not None:
                made = clone(some)
            else:
                made = [torch.empty_like(source) for source in some]
                copy_all(made, some)
            found.update(zip(places, made, strict=True))
    return [found[place] for place in range(len(sources))]


def _by_kind(*lists: Sequence[torch.Tensor]) -> Iterable[Sequence[int]]:
    """Group the places of tensors by type and dtype, in all lists at once.

    torch takes a list of several dtypes one by one. And where a subclass is among them, the whole list becomes of its
    kind.
    """
    facts = []
    for tensors in lists:
        facts += [[tensor.dtype for tensor in tensors], [type(tensor) for tensor in tensors]]
    kinds = list(zip(*facts, strict=True))
    if len(set(kinds)) <= 1:
        return [range(len(kinds))] if kinds else []
    groups: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(place)
    return groups.values()


def norms(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the Euclidean norm of each floating tensor, of shape [tensors]; infinite on overflow.

    The norms are float32, or float64 for tensors in float64. All tensors are on one device, of one dtype, and not
    empty. Takes few launches.
    """
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    norm: Callable[..., Iterable[torch.Tensor]] | None = private_or("torch:_foreach_norm", None)
    with torch.no_grad():
        if norm is not None:
            return torch.stack(list(norm(list(tensors), dtype=dtype)))
        return torch.stack([torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors])
