"""Which memory tensors have, whatever names lead to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.views import can_be_guarded, guard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Give the memory that a tensor has now, without gradients: a later ``tensor.data = other`` leaves it as it is.

    A sparse tensor has several, and is given itself.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Tell a tensor's view of its memory from others: ``tensor.t_()`` leaves the address as it is, not the strides.

    Empty for a sparse tensor, and for one that is spread over processes.
    """
    if not _has_address(tensor):
        return ()
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _has_address(tensor: torch.Tensor) -> bool:
    try:
        return tensor.layout == torch.strided and tensor.data_ptr() is not None
    except (RuntimeError, NotImplementedError):  # a tensor in name only
        return False


_address = torch.Tensor.data_ptr
_GUARDS = 4
"""How often a guard is made anew: where torch's modes change all the time it would never be of use."""


class Views:
    """Tells at a glance whether tensors still are the same views of the same memory, as `view_of` gives them.

    Hundreds are looked at before each replay. Each is asked for its address, but not for its shape and strides, which
    takes three times as long: a guard of torch's compiler compares those of all tensors in one call.

    Args:
        tensors: which; those without an address are not looked at.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list({id(one): one for one in tensors if _has_address(one)}.values())
        self._addresses, self._then = [*map(_address, self._tensors)], [*map(view_of, self._tensors)]
        self._plain = [one for one in self._tensors if can_be_guarded(one)]
        self._others = [(one, view_of(one)) for one in self._tensors if not can_be_guarded(one)]
        self._guard: Callable[[], bool] | None = None
        self._guards = 0

    def same(self) -> bool:
        """Tell whether none has other memory, or another shape, strides or dtype."""
        try:
            if [*map(_address, self._tensors)] != self._addresses:
                return False
        except (RuntimeError, NotImplementedError):  # swap_tensors put in its place what has no address
            return False
        if self._guard is not None and self._guard():
            return all(view_of(one) == then for one, then in self._others)
        if [*map(view_of, self._tensors)] != self._then:
            return False
        if self._guards < _GUARDS:
            self._guards += 1
            self._guard = guard(self._plain)
        return True

    def moved(self) -> list[torch.Tensor]:
        """Give those that are not the same."""
        return [one for one, then in zip(self._tensors, self._then, strict=True) if view_of(one) != then]


class Memory:
    """Which memory tensors have: ``tensor.data = other`` gives a tensor other memory, and neither counts as a write.

    A tensor that is another view of the same memory (``tensor.t_()``) has other memory, too.

    Args:
        tensors: the objects that the program knows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._views = list(tensors), Views(tensors)
        self._at = [*map(view_of, tensors)]
        self._had = [in_place(one) for one in tensors]

    def moved(self) -> list[int]:
        """Give the places of the tensors that have another memory now."""
        if self._views.same():
            return []
        pairs = enumerate(zip(self._tensors, self._at, strict=True))
        return [place for place, (tensor, at) in pairs if view_of(tensor) != at]

    def restore(self) -> None:
        """Give each the memory that it had; what is in it is not touched."""
        for place in self.moved():
            self._tensors[place].data = self._had[place]

    def bring_back(self) -> None:
        """Give each the memory that it had, with what the tensor holds now.

        Raises:
            RuntimeError: the tensor has another shape now, so that it holds no value for each element; or it has the
                memory of another one, so that who writes into one writes into both.
        """
        places = self.moved()
        if places and len(self._addresses()) > len({*self._addresses()}):
            raise RuntimeError("a tensor was given the memory of another one")
        for place in places:
            tensor, had = self._tensors[place], self._had[place]
            if tensor.shape != had.shape:
                raise RuntimeError(f"a tensor of {tuple(had.shape)} was given the shape {tuple(tensor.shape)}")
            had.copy_(tensor.detach().clone())  # by way of a copy: the two may be views of one memory
            tensor.data = had

    def _addresses(self) -> list[int]:
        """Give where the memory of each begins, once a tensor; not of those that have none."""
        views = map(view_of, {id(one): one for one in self._tensors}.values())
        return [view[0] for view in views if view and view[0]]
