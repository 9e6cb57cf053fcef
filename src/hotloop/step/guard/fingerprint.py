"""What stands for a value of the user's in a look at Python state, so that two looks compare with ``==``."""

from __future__ import annotations

import array
import collections
import collections.abc
import dataclasses
import enum
import gc
import hashlib
import io
import itertools
import logging
import random
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import class_forward
from hotloop.step.state.memory import view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

SCALARS = (int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device, torch.Size)
ABSENT: Any = object()
_BYTES, _MOST_BYTES = 64 * 2**10, 2**28
"""An array is compared by what it holds up to the first size; a larger one cannot be, before each replay. A survey,
which is made once, compares what is within the second one as well."""
_ITEMS, _NESTED = 200, 4
"""Of a container in an object of a library: the most items, and containers in one another, that are looked at."""


class Same:
    """Stands for one object, and is equal to nothing else.

    It does not keep the object, where it need not; a bare ``id`` would not either, but may be another object's once
    this one is gone.

    Args:
        value: the object.
        facts: what else has to be equal, where both have some.
        keep: keep it: torch swaps no tensor that has weak references (`torch.utils.swap_tensors`).
    """

    __slots__ = ("_facts", "_ref")

    def __init__(self, value: Any, facts: Any = None, *, keep: bool = False) -> None:
        self._facts = facts
        try:
            self._ref: Any = (lambda: value) if keep else weakref.ref(value)
        except TypeError:  # an object without weak references is kept
            self._ref = lambda: value

    @property
    def is_tensor(self) -> bool:
        """Tell whether it stands for a tensor."""
        return isinstance(self._ref(), torch.Tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same):
            return False
        if self._facts is not None and other._facts is not None and self._facts != other._facts:
            return False
        own = self._ref()
        return own is not None and own is other._ref()

    __hash__ = None  # type: ignore[assignment]


class Unknown:
    """Equal to nothing, itself included."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Unwatchable:
    """State that no look before a replay can follow: a capture has to be declined for it.

    ``content`` tells whether a step that was looked at has changed it: its Python then must not run twice.
    """

    why: str
    content: Any = None


def plain(value: Any) -> Any:
    """Give a scalar with its type; NaN equals itself here."""
    return ("nan",) if value != value else (type(value).__name__, value)  # noqa: PLR0124 - NaN is unequal to itself


def alike(one: Any, other: Any) -> bool:
    """Tell whether two objects are one, or plain scalars that no step could tell apart. Tensors are never compared."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, SCALARS) and plain(one) == plain(other)


def is_plain(value: Any, owner: type, depth: int = 0) -> bool:
    """Tell whether a value is one that code keeps between two steps: a number, a text, a tensor, or some of these.

    Caches, locks, handles and other objects are not, but for those of the owner's own class: settings within settings.
    """
    if isinstance(value, (*SCALARS, torch.Tensor)) or number_of(value) is not None:
        return True
    if depth >= _NESTED:
        return False
    if isinstance(value, dict):
        return len(value) <= _ITEMS and all(is_plain(one, owner, depth + 1) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return len(value) <= _ITEMS and all(is_plain(one, owner, depth + 1) for one in value)
    return depth > 0 and type(value) is owner


def plain_ones(fields: Mapping[str, Any], owner: type) -> set[str]:
    """Name the attributes of an object of a library that `is_plain` tells of."""
    return {key for key, value in fields.items() if is_plain(value, owner)}


class Slot:
    """What a slot holds: equal to the same object, or to a scalar like it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and alike(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]


def key_of(key: Any) -> str:
    """Give what stands for a key of a mapping in names; of an object, which may print itself at length, its kind."""
    if isinstance(key, tuple):
        return f"({', '.join(map(key_of, key))})"
    return repr(key) if isinstance(key, (*SCALARS, enum.Enum)) else f"<{type(key).__name__}>"


def forward_of(cls: type[torch.nn.Module]) -> Slot:
    """Give the forward of a class, which somebody may replace."""
    return Slot(class_forward(cls))


def own_step(optimizer: torch.optim.Optimizer) -> Slot:
    """Give the step that somebody has set on an optimizer, as schedulers do."""
    return Slot(vars(optimizer).get("step"))


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Give what a recording froze of a tensor beside its identity: whether it is trained, and its view of its memory.

    An address alone would not do: ``tensor.t_()`` and ``tensor.resize_()`` leave it as it is.
    """
    return tensor.requires_grad, tensor.is_leaf, view_of(tensor)


def is_array(value: Any) -> bool:
    """Tell whether a value is an array whose content changes in place, or memory in C."""
    numpy = sys.modules.get("numpy")
    return _is_plain_memory(value) or (numpy is not None and isinstance(value, numpy.ndarray))


def _is_plain_memory(value: Any) -> bool:
    c = sys.modules.get("_ctypes")
    in_c = c is not None and isinstance(value, c.Structure.__mro__[-2])  # the base of all, which has no name there
    return in_c or isinstance(value, bytearray | array.array | memoryview)


def content_of(value: Any) -> Any:
    """Give what an array holds; of a large one, or one of objects, that it cannot be watched."""
    view = memoryview(value) if _is_plain_memory(value) else value
    if not _is_plain_memory(value) and value.dtype.hasobject:
        return Unwatchable("an array of objects")
    kind = getattr(value, "dtype", type(value).__name__)
    held = hashlib.blake2b(view.tobytes(), digest_size=16).digest() if view.nbytes <= _MOST_BYTES else b""
    content = str(kind), tuple(view.shape or ()), held
    return content if view.nbytes <= _BYTES else Unwatchable(f"an array of {view.nbytes // 2**10} KiB", content)


def number_of(value: Any) -> Any:
    """Give a scalar of numpy's as Python's; None for all else."""
    numpy = sys.modules.get("numpy")
    return (value.dtype.str, plain(value.item())) if numpy is not None and isinstance(value, numpy.generic) else None


def scaler_facts(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Give the settings of a GradScaler that a recording holds as numbers; its scale is in a tensor."""
    if not scaler.is_enabled():  # it has no other settings then
        return {"enabled": False}
    return {
        "enabled": True,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }


def state_of(value: Any) -> Any:
    """Give what tells that an array, a number of numpy's, an iterator or a generator is as it was; None for others."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # stepped inside the step, it would stand still
        return "schedule", value.last_epoch
    if isinstance(value, torch.Generator):  # of the user's own: no proof puts it back, and no recording draws from it
        return "random", hash(value.get_state().numpy().tobytes())
    if is_array(memory := _memory_of(value)):
        return content_of(memory)
    if isinstance(value, threading.Event):
        return "event", value.is_set()
    if isinstance(value, logging.Logger):
        return "level", value.getEffectiveLevel()
    number = number_of(value)
    return number if number is not None else position(value)


def _memory_of(value: Any) -> Any:
    """Give the memory of a value that processes share (``multiprocessing.Value``), without its lock; else the value."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    return value.get_obj() if shared is not None and isinstance(value, shared.SynchronizedBase) else value


def variables_of(value: Any) -> dict[str, Any]:
    """Give what a generator that has not ended goes on with: its variables, and what its loops are over."""
    frame = value.gi_frame if isinstance(value, types.GeneratorType) else None
    if frame is None:
        return {}
    found = dict(frame.f_locals)
    known = {id(one) for one in found.values()}
    # `for x in other()` and `yield from other()` keep the other where no variable shows it.
    loops = [
        one for one in gc.get_referents(value) if isinstance(one, collections.abc.Iterator) and id(one) not in known
    ]
    return {**found, **{f"what loop {number} is over": one for number, one in enumerate(loops, 1)}}


def variables_now(value: Any) -> dict[str, Slot]:
    """Give what tells that the variables of a generator are as they were: a loop yields at one place for ever."""
    return {key: Slot(one) for key, one in variables_of(value).items()}


def position(value: Any) -> Any:
    """Tell where an iterator or a random generator is, so that its use in a step shows; None for other objects."""
    if isinstance(value, random.Random):
        own = not isinstance(value, random.SystemRandom)  # the machine's has no state
        return ("random", hash(value.getstate())) if own else None
    if _is_numpys(value):
        return "random", str(value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state())
    if isinstance(value, itertools.count):
        return "count", repr(value)
    if isinstance(value, types.GeneratorType):  # a generator is where its code is: a loop stops at the same place
        return "generator", value.gi_frame.f_lasti if value.gi_frame is not None else -1
    # Asked of the class, as Python does: settings that answer any attribute have none, or raise.
    if (length := getattr(type(value), "__length_hint__", None)) is not None and not isinstance(value, type):
        return "left", length(value)
    return _position_of_others(value)


def _position_of_others(value: Any) -> Any:
    if isinstance(value, io.StringIO | io.BytesIO):
        return "written up to", -1 if value.closed else value.tell()
    if not isinstance(value, collections.abc.Iterator):
        return None
    if type(value).__module__ in ("builtins", "itertools"):  # cycle, zip, map: nobody can tell
        return Unknown()
    if is_users_object(value) or not hasattr(value, "__dict__"):  # the first is looked at like any object
        return None
    return tuple(one for one in vars(value).values() if type(one) is int)  # a data loader's counts what it has given


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


_LIBRARIES = ("torch", "numpy", "builtins", "hotloop", "logging", "threading", "lightning", "tqdm", "rich")


def is_frameworks(cls: type) -> bool:
    """Tell whether a class is a trainer's or hotloop's, of whose objects it is known what a step changes."""
    if cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric", "hotloop"):
        return True
    return cls.__module__.startswith("transformers.trainer")  # its schedule goes on outside the step


def is_users_object(value: Any) -> bool:
    """Tell whether a value is looked into by its attributes."""
    if isinstance(value, type | types.ModuleType | torch.optim.Optimizer):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES and (
        hasattr(value, "__dict__") or bool(slots_of(type(value)))
    )


def is_users_class(cls: type) -> bool:
    """Tell whether the attributes of a class are looked at: those of Python's own classes and of torch's are not."""
    top = cls.__module__.partition(".")[0]
    return top not in _LIBRARIES and top not in sys.stdlib_module_names


def slots_of(cls: type) -> tuple[str, ...]:
    """Give the attributes that a class keeps in slots."""
    return tuple(
        name
        for base in cls.__mro__
        if is_users_class(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    )
