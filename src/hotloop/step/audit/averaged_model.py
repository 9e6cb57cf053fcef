"""Questions that torch's own code asks the host in every step, and whose answer stays the same while steps go on.

`torch.optim.swa_utils.AveragedModel` asks at each update whether it has averaged anything yet. Once it has, it always
has: the answer is given without waiting for the device, so that a step which updates an average can be captured.

Unless it was given a device, an average counts on the host. While the loop captures steps another tensor is in the
count's place, on the device. Checkpoints and copies have the count as eager has it. A write of the program's own
(``load_state_dict``) puts it back, and recordings are dropped: it may be 0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from hotloop._torch.fake import version_of
from hotloop._torch.foreach import weighed_on_device
from hotloop.step.audit.host_side import lies_on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

_COUNT = "n_averaged"
_ADDS = frozenset({"add_", "__iadd__"})
_moved: weakref.WeakKeyDictionary[AveragedModel, tuple[torch.Tensor, RemovableHandle]] = weakref.WeakKeyDictionary()
"""By average: the count in place of which another is used, and the hook of its checkpoints."""


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's on counts as on other tensors; its result is a tensor like others."""
    return torch.Tensor.__torch_function__(function, (), args, kwargs)  # type: ignore[no-untyped-call]


class _Positive(torch.Tensor):
    """A count on the device that is known to be above 0: compared with 0 it answers at once."""

    __hash__ = torch.Tensor.__hash__

    def __eq__(self, other: object) -> Any:
        return False if _is_zero(other) else super().__eq__(other)

    def __gt__(self, other: Any) -> Any:
        return True if _is_zero(other) else super().__gt__(other)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Let what is computed of the count be a tensor like others: it need not be above 0."""
        return _plain(func, *args, **(kwargs or {}))


class _Moved(_Positive):
    """A count on the device that stands for a while in the place of the average's own, which may be on the host."""

    average: weakref.ref[AveragedModel]
    home: torch.device

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `_Positive`; and give the count back where it is written anew (``load_state_dict``): it may be 0."""
        count = args[0] if args and isinstance(args[0], cls) and func.__name__ not in _ADDS else None
        before = _version(count)
        result = super().__torch_function__(func, types, args, kwargs)
        if count is not None and _version(count) != before and (average := count.average()) is not None:
            _give_back(average)
        return result

    def as_eager(self) -> torch.Tensor:
        """Return a copy where eager has the count."""
        copied: torch.Tensor = _plain(torch.Tensor.to, self, self.home, copy=True)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        memo[id(self)] = copied = self.as_eager()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_eager().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class _Recorded(_Positive):
    """A count in a step that is audited or recorded.

    By default torch's update weighs with ``1 / (count + 1)``, a number that it reads on the host.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `_Positive`; numbers that are computed of the count are weights."""
        result = super().__torch_function__(func, types, args, kwargs)
        number = type(result) is torch.Tensor and not result.ndim
        return result.as_subclass(_Weight) if number else result


class _Weight(torch.Tensor):
    """A number that was computed of a count: an average takes it on the device."""


def _version(count: _Moved | None) -> int:
    return version_of(_plain(torch.Tensor.detach, count)) if count is not None else 0


def _is_zero(other: object) -> bool:
    return type(other) is int and other == 0


class _AsEager:
    """A state_dict post-hook, which gives the count as eager has it. In a copy of the average it does nothing."""

    def __call__(self, average: AveragedModel, document: dict[str, Any], prefix: str, _metadata: Any) -> None:
        count = vars(average)["_buffers"].get(_COUNT)
        if isinstance(count, _Moved) and prefix + _COUNT in document:
            document[prefix + _COUNT] = count.as_eager()

    def __reduce__(self) -> Any:  # a copy, or a file, has no use for it: whoever loads it may not have hotloop
        return functools.partial, (sys.audit, "hotloop.average_copied")


def _averages(roots: Mapping[str, torch.nn.Module]) -> list[AveragedModel]:
    return [one for root in roots.values() for one in root.modules() if isinstance(one, AveragedModel)]


@contextlib.contextmanager
def answered(roots: Mapping[str, torch.nn.Module], device: torch.device | None = None) -> Iterator[list[AveragedModel]]:
    """Let averages of weights know in the block that they have begun; reads their counts once, before it.

    Args:
        roots: the modules that may be averages, or hold some.
        device: brings counts on the host to this device for the block; their new values are copied back at its end.

    Yields:
        the averages that have not begun yet: nothing is answered for them.
    """
    begun, waiting = [], []
    for average in _averages(roots):
        count, held = average.n_averaged, vars(average)["_buffers"]
        if not int(count):
            waiting.append(average)
            continue
        brought = device is not None and lies_on_host(count, device)
        there = count.to(device, copy=True) if brought else count
        begun.append((held, count, _plain(torch.Tensor.as_subclass, there, _Recorded), brought))
    for held, _, recorded, _ in begun:
        held[_COUNT] = recorded
    try:
        with weighed_on_device(_Weight) if begun else contextlib.nullcontext():
            yield waiting
    finally:
        for held, count, recorded, brought in begun:
            held[_COUNT] = count
            if brought:
                count.copy_(_plain(torch.Tensor.detach, recorded))


def move_counts(roots: Mapping[str, torch.nn.Module], device: torch.device) -> None:
    """Put counts on the device of a recorded step in the place of those of averages that have begun."""
    for average in _averages(roots):
        count = average.n_averaged
        if isinstance(count, _Moved) or not int(count):
            continue
        if (stale := _moved.pop(average, None)) is not None:  # the program has replaced the count since
            stale[1].remove()
        there = count.to(device, copy=True).as_subclass(_Moved)
        there.average, there.home = weakref.ref(average), count.device
        _moved[average] = count, average.register_state_dict_post_hook(_AsEager())  # type: ignore[no-untyped-call]
        vars(average)["_buffers"][_COUNT] = there


def return_counts(roots: Mapping[str, torch.nn.Module]) -> None:
    """Put the averages' own counts back; each on the host waits once for the device."""
    for average in _averages(roots):
        _give_back(average)


def _give_back(average: AveragedModel) -> None:
    if (moved := _moved.pop(average, None)) is None:
        return
    (count, handle), held = moved, vars(average)["_buffers"]
    handle.remove()
    if isinstance(there := held.get(_COUNT), _Moved):  # else the program has replaced it
        count.copy_(_plain(torch.Tensor.detach, there))
        held[_COUNT] = count
