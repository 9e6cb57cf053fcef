"""Hears what reads tensors past the dispatcher: printing turns it off, the others look at a CPU's memory."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack

from hotloop._torch.dispatch import tensors_in
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_READERS: tuple[tuple[Any, str, str], ...] = (
    (torch.Tensor, "__repr__", "print"),
    (torch.Tensor, "tolist", "tolist"),
    (torch.Tensor, "numpy", "numpy"),
    (torch.Tensor, "__array__", "numpy"),
    (torch.Tensor, "__dlpack__", "dlpack"),
    (torch.utils.dlpack, "to_dlpack", "dlpack"),
)
"""Functions that read a tensor, where they are, and what their user knows them as."""


@contextlib.contextmanager
def silent_reads(note: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Call ``note`` with each tensor that such a function reads in the block, and with what the user calls it."""

    def listening(by: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            note(tensor, by)
            return real(tensor, *args, **kwargs)

        return read

    def splitting(real: Callable[..., Any]) -> Callable[..., Any]:
        def split(*args: Any, **kwargs: Any) -> Any:
            for places in (one for one in (*args[1:], *kwargs.values()) if isinstance(one, torch.Tensor)):
                note(places, "tensor_split by a tensor")
            return real(*args, **kwargs)

        return split

    with contextlib.ExitStack() as stack:
        for owner in (torch.Tensor, torch):  # reads where to split, if a tensor says it
            stack.enter_context(replaced(owner, "tensor_split", splitting))
        for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")):
            stack.enter_context(replaced(owner, name, functools.partial(_gathering, note)))
        for owner, name, by in _READERS:
            stack.enter_context(replaced(owner, name, functools.partial(listening, by)))
        yield


def _gathering(note: Callable[[torch.Tensor, str], None], real: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(*args: Any, **kwargs: Any) -> Any:
        for one in tensors_in(*(each for each in (*args, kwargs.get("data")) if isinstance(each, list | tuple))):
            note(one, "a list of tensors, of which one is made")
        return real(*args, **kwargs)

    return gathered
