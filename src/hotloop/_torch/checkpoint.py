"""Regions of ``torch.utils.checkpoint``: whose forward a call is in, and whether that forward is being recomputed."""

from __future__ import annotations

import inspect
import weakref
from typing import TYPE_CHECKING, Any, ClassVar

from hotloop._torch.ledger import private, private_or

if TYPE_CHECKING:
    from collections.abc import Callable

_FORWARD, _RECOMPUTE = "torch.utils.checkpoint:_checkpoint_hook", "torch.utils.checkpoint:_recomputation_hook"


class Region:
    """The calls in one checkpointed forward, in order, each with a note of how it ran."""

    _all: ClassVar[weakref.WeakKeyDictionary[Any, Region]] = weakref.WeakKeyDictionary()
    """By torch's own object for the forward."""

    def __init__(self) -> None:
        self._notes: list[tuple[Any, Any]] = []
        self._read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """By recomputation: how many notes were read; with ``retain_graph=True`` there are several."""

    @classmethod
    def of(cls, frame: Any) -> Region:
        """Return the region of torch's object."""
        return cls._all.setdefault(frame, cls())

    def note(self, caller: Any, how: Any) -> None:
        """Note how a call of the forward ran."""
        self._notes.append((caller, how))

    def next(self, recomputation: Any, caller: Any) -> Any:
        """Return how the call ran that is recomputed now; None where the forward did not make that call."""
        place = self._read.get(recomputation, 0)
        self._read[recomputation] = place + 1
        known, how = self._notes[place] if place < len(self._notes) else (None, None)
        return how if known is caller else None


def region_probe() -> Callable[[], tuple[Region, Any] | None]:
    """Return the function that gives the region around a call, and its recomputation: None in the forward itself.

    It returns None outside of regions, which takes 0.1 µs. The reentrant kind of checkpoint is no region: it runs its
    forward without gradients.
    """
    hooks_in_force: Callable[[bool], Any] = private_or(
        "torch._C._autograd:_top_saved_tensors_default_hooks", lambda _: None
    )

    def probe() -> tuple[Region, Any] | None:
        hooks = hooks_in_force(True)  # also where something is traced
        return None if hooks is None else _region_of(hooks[0])

    return probe


def _region_of(hook: Any) -> tuple[Region, Any] | None:
    """Return the region whose hook packs saved tensors; None for the hook of somebody else (`save_on_cpu`)."""
    maker = getattr(hook, "__qualname__", "").split(".")[0]
    if getattr(hook, "__module__", "") != "torch.utils.checkpoint":
        return None
    held = inspect.getclosurevars(inspect.unwrap(hook)).nonlocals
    if maker == private(_FORWARD).__name__ and "frame" in held:
        return Region.of(held["frame"]), None
    if maker == private(_RECOMPUTE).__name__ and "target_frame_ref" in held:
        frame = held["target_frame_ref"]()
        return None if frame is None else (Region.of(frame), hook)
    return None
