"""Fake values: tensors without data, on which a graph is run to learn shapes, strides and what needs a gradient."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def fake_mode() -> Any:
    """Give the mode whose fake values the compilers of the trace in progress use.

    Raises:
        RuntimeError: nothing is being traced.
        CapabilityMissingError: this torch keeps it elsewhere.
    """
    mode = private("torch._guards:detect_fake_mode")()
    if mode is None:
        raise RuntimeError("no trace is in progress")
    return mode


def to_fake(value: Any, mode: Any) -> Any:
    """Give the fake of a real tensor, with the dynamic sizes that dynamo chose for it; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return private("torch._dynamo.utils:to_fake_tensor")(value, mode)


@contextlib.contextmanager
def on_fakes(mode: Any) -> Iterator[None]:
    """Run operations on fake values; Python's dispatcher keeps their symbolic sizes symbolic.

    Gradients are on or off afterwards as before: a piece may end before it switches them back.
    """
    with (
        torch.set_grad_enabled(torch.is_grad_enabled()),
        mode,
        private("torch._dispatch.python:enable_python_dispatcher")(),
    ):
        yield


def version_of(value: torch.Tensor) -> int:
    """Give how often a tensor was changed in place; inference tensors do not count."""
    return value._version  # noqa: SLF001 - in the ledger


def uncounted(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Have writes in the block count as none: for those that leave a tensor as autograd has found it."""
    counting = tuple(one for one in tensors if not one.is_inference())
    try:
        found: contextlib.AbstractContextManager[None] = private("torch.autograd:_unsafe_preserve_version_counter")(
            counting
        )
    except CapabilityMissingError:
        return contextlib.nullcontext()
    return found


def is_part(value: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of another."""
    return value._is_view()  # noqa: SLF001 - in the ledger
