"""The memory that tensors have, and which view of it a tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.views import can_be_guarded, guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor has now, without gradients; a later ``tensor.data = other`` does not change it.

    A sparse tensor has several pieces of memory, and is returned itself.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return address, shape, strides and dtype: ``tensor.t_()`` keeps the address, but not the strides.

    Empty for a sparse tensor, and for a tensor that is spread over processes.
    """
    try:
        if tensor.layout == torch.strided and (address := tensor.data_ptr()) is not None:
            return address, tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # a wrapper subclass without memory of its own
        pass
    return ()


class Views:
    """A quick check whether tensors still are the same views of the same memory, as `view_of` describes them.

    Hundreds of tensors are checked before each replay. Each is asked for its address. Shapes and strides would take
    three times as long: a guard of torch's compiler compares those of all tensors in one call.

    Args:
        tensors: the tensors; those without an address are ignored.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        views = {id(tensor): (tensor, view_of(tensor)) for tensor in tensors}
        self._then = [(tensor, view) for tensor, view in views.values() if view]
        self._tensors = [tensor for tensor, _ in self._then]
        self._addresses = [view[0] for _, view in self._then]
        self._guarded = [tensor for tensor in self._tensors if can_be_guarded(tensor)]
        self._unguarded = [(tensor, view) for tensor, view in self._then if not can_be_guarded(tensor)]
        self._guard: Callable[[], bool] | None = None
        self._guards_left = 4  # where torch's modes change all the time, a new guard would never be of use

    def same(self) -> bool:
        """Return whether every tensor has the same memory, shape, strides and dtype as before."""
        try:
            if [*map(torch.Tensor.data_ptr, self._tensors)] != self._addresses:
                return False
        except (RuntimeError, NotImplementedError):  # swap_tensors put a tensor without an address in its place
            return False
        if self._guard is not None and self._guard():
            return all(view_of(tensor) == then for tensor, then in self._unguarded)
        if self.moved():
            return False
        if self._guards_left:
            self._guards_left -= 1
            self._guard = guard(self._guarded)
        return True

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that have other memory, or another shape, strides or dtype."""
        return [tensor for tensor, then in self._then if view_of(tensor) != then]


class Memory:
    """The memory that tensors have: ``tensor.data = other`` changes it, which torch does not count as a write.

    A tensor that becomes another view of the same memory (``tensor.t_()``) counts as moved, too.

    Args:
        tensors: the objects that the program knows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._views = list(tensors), Views(tensors)
        self._at = [*map(view_of, tensors)]
        self._had = [*map(in_place, tensors)]

    def moved(self) -> list[int]:
        """Return the indices of the tensors that have other memory now."""
        if self._views.same():
            return []
        pairs = enumerate(zip(self._tensors, self._at, strict=True))
        return [place for place, (tensor, at) in pairs if view_of(tensor) != at]

    def restore(self) -> None:
        """Put each tensor back on the memory that it had; the values in that memory are not touched."""
        for place in self.moved():
            self._tensors[place].data = self._had[place]

    def bring_back(self) -> None:
        """Put each tensor back on the memory that it had, with the values that the tensor holds now.

        Raises:
            RuntimeError: a tensor has another shape now, so it lacks values; or it has the memory of another tensor,
                so a write into one would change both.
        """
        places = self.moved()
        if not places:
            return
        views = map(view_of, {id(tensor): tensor for tensor in self._tensors}.values())
        addresses = [view[0] for view in views if view and view[0]]
        if len(addresses) > len({*addresses}):
            raise RuntimeError("a tensor was given the memory of another one")
        for place in places:
            tensor, had = self._tensors[place], self._had[place]
            if tensor.shape != had.shape:
                raise RuntimeError(f"a tensor of {tuple(had.shape)} was given the shape {tuple(tensor.shape)}")
            had.copy_(tensor.detach().clone())  # through a copy, since the two may be views of one memory
            tensor.data = had
