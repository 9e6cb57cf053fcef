"""Fake values, on which a graph is run to learn shapes and strides; and tensors' version counters."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private, private_or
from hotloop._torch.sharded import shard_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class FakeMode:
    """The mode of the fake values that the compilers of the trace in progress use.

    Raises:
        RuntimeError: nothing is being traced.
        CapabilityMissingError: this torch keeps it elsewhere.
    """

    def __init__(self) -> None:
        self._mode = private("torch._guards:detect_fake_mode")()
        if self._mode is None:
            raise RuntimeError("no trace is in progress")

    def fake(self, value: Any) -> Any:
        """Return the fake of a tensor, with the dynamic sizes that dynamo chose for it; other values as they are."""
        if not isinstance(value, torch.Tensor):
            return value
        return private("torch._dynamo.utils:to_fake_tensor")(value, self._mode)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run operations on fake values in the block; Python's dispatcher keeps their symbolic sizes symbolic.

        Gradients are on or off afterwards as before: a piece may end before it switches them back.
        """
        dispatcher = private("torch._dispatch.python:enable_python_dispatcher")()
        with torch.set_grad_enabled(torch.is_grad_enabled()), self._mode, dispatcher:
            yield


def version_of(value: torch.Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not count.

    Of a tensor that is spread over processes this process's part is written, and counted.
    """
    return shard_of(value)._version  # noqa: SLF001 - in the ledger


def uncounted(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Return a context whose writes do not count as changes: they leave a tensor as autograd has found it."""
    preserve = private_or("torch.autograd:_unsafe_preserve_version_counter", lambda _: contextlib.nullcontext())
    context: contextlib.AbstractContextManager[None] = preserve(
        tuple(tensor for tensor in tensors if not tensor.is_inference())
    )
    return context


def is_view(value: torch.Tensor) -> bool:
    """Return whether a tensor is a view of another tensor."""
    return value._is_view()  # noqa: SLF001 - in the ledger
