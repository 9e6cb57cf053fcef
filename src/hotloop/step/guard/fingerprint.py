"""What stands for a value of the user's, so that two looks at it compare with ``==``."""

from __future__ import annotations

import array
import collections
import collections.abc
import contextvars
import dataclasses
import enum
import functools
import gc
import hashlib
import io
import itertools
import logging
import mmap
import multiprocessing.connection
import multiprocessing.queues
import queue
import random
import sys
import threading
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop.step.guard.users import is_users_object
from hotloop.step.state.holdings import view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCALARS = (int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device, torch.Size)
ABSENT: Any = object()
_BYTES, _MOST_BYTES = 64 * 2**10, 2**28
"""An array is compared by what it holds up to the first size; a larger one cannot be, before each replay. An audit,
which is made once, compares what is within the second one as well."""
_ENTRIES = 20_000
"""Values looked at, at most; where there are more, no recording can be guarded."""
_TAKEN_FROM = (
    queue.SimpleQueue,
    multiprocessing.queues.Queue,
    multiprocessing.queues.SimpleQueue,
    multiprocessing.connection.Connection,
)
"""What holds in C, or in a pipe, what others put there: each run of a proof would take another item."""
_DEPTH = 24
"""Containers in one another that are looked at."""
_ITEMS, _NESTED = 200, 4
"""Of a container in an object of a library: the most items, and containers in one another, that are looked at."""
_READERS = frozenset({"get", "items", "keys", "values", "__getitem__", "__contains__", "__len__", "__next__"})
"""Methods by which a step may hold an object to read it, whatever it is."""
_ADDERS = frozenset({"append", "appendleft", "extend", "extendleft", "insert", "add", "update", "__setitem__"})
"""Methods of containers that read nothing of these."""


class Same:
    """One object, equal to nothing else.

    It does not keep the object, where it need not; a bare ``id`` would not either, but may be another object's once
    this one is gone.

    Args:
        value: the object.
        facts: what else has to be equal, where both have some.
        keep: keep it: torch swaps no tensor that has weak references (`torch.utils.swap_tensors`, `Module.to`).
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
        """Return whether it stands for a tensor."""
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
    """A value that is equal to nothing, itself included."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class Unwatchable:
    """State that no look before a replay can follow: a capture has to be declined for it.

    ``content`` is another one where a step that was audited has changed it: its Python then must not run twice.
    """

    why: str
    content: Any = None


@dataclasses.dataclass(frozen=True, eq=True)
class Items:
    """What a container holds: its kind, what else it is known by, the names of its items, and their fingerprints."""

    kind: str
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


def differs_at(before: Any, after: Any) -> str:
    """Return which item of a container differs, as code reads it: ``[0]['weight']``; empty for no single one."""
    if not (isinstance(before, Items) and isinstance(after, Items) and before.keys == after.keys):
        return ""
    for key, one, other in zip(before.keys, before.values, after.values, strict=True):
        if one != other:
            return f"{key}{differs_at(one, other)}"
    return ""


def unwatchable_in(value: Any) -> Iterator[str]:
    """Yield why a fingerprint cannot be compared before each replay, for each part that cannot."""
    if isinstance(value, Unwatchable):
        yield value.why
    elif isinstance(value, Items):
        for item in value.values:
            yield from unwatchable_in(item)


class Fingerprints:
    """Makes fingerprints of values, and notes what a quick check before each replay compares.

    Args:
        held: identities of tensors whose memory and flags are compared elsewhere.

    Attributes:
        lists, tables, sets: containers, compared item by item.
        computed: what has to be asked anew: contents of arrays, what an object of Python's own holds.
        tensors: those that nobody else compares.
    """

    def __init__(self, held: collections.abc.Set[int] = frozenset()) -> None:
        self.lists: list[Any] = []
        self.tables: list[dict[Any, Any]] = []
        self.sets: list[Any] = []
        self.computed: list[Callable[[], Any]] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self._held, self._known, self._left = held, dict[int, Any](), _ENTRIES

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the fingerprint of a value: scalars and containers by what they hold, objects by identity."""
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            return Unwatchable(f"more than {_ENTRIES:,} values" if self._left < 0 else "nested too deep")
        if isinstance(value, SCALARS):
            return plain(value)
        if isinstance(value, torch.Tensor):
            facts = None if id(value) in self._held else facts_of(value)
            if facts is not None:
                self.tensors[id(value)] = value
            # The loop keeps what it was given anyway. A result is not kept: its graph holds all that it was made of.
            return Same(value, facts, keep=facts is None or value.is_leaf)
        place = id(value)
        if (known := self._known.get(place)) is None:
            self._known[place] = value, ("itself",)  # a container may hold itself
            known = self._known[place] = value, self._made(value, depth)
        return known[1]

    def _made(self, value: Any, depth: int) -> Any:
        if isinstance(value, set | frozenset):
            self.sets.append(value)
            return "set", frozenset(value)
        if isinstance(value, weakref.ref) and (referent := _referent(value)) is not None:
            self.computed.append(functools.partial(_referent, value))
            return referent
        parts = parts_of(value)
        if parts is None:
            if (state := state_of(value)) is not None:
                self.computed.append(functools.partial(state_of, value))
            return state if state is not None else (type(value), Same(value))
        if isinstance(value, list | collections.deque):
            self.lists.append(value)
        elif isinstance(value, dict):
            self.tables.append(value)
        if not isinstance(value, list | tuple | dict | collections.deque) or type(value) is collections.defaultdict:
            self.computed.append(lambda: [Slot(item) for item, _ in parts_of(value) or ()])
        items = tuple(self.of(item, depth + 1) for item, _ in parts)
        return Items(type(value).__name__, tuple(name for _, name in parts), items)


Parts = list[tuple[Any, str]]
"""What an object of Python's own holds, and how code gets at each."""


def parts_of(value: Any) -> Parts | None:
    """Return what an object of Python's own holds; None for other objects, which are known by their attributes."""
    return next((parts(value) for kind, parts in _PARTS if isinstance(value, kind)), None)


def _referent(reference: weakref.ref[Any]) -> Same | None:
    """Return what stands for an object that is known by its attributes, without keeping it, as the program does not."""
    value = reference()
    known_otherwise = isinstance(value, (*SCALARS, torch.Tensor)) or parts_of(value) is not None
    return None if known_otherwise or state_of(value) is not None else Same(value)


def _of_mapping(value: Any) -> Parts | None:
    if "__builtins__" in value:  # what code that was made of a text has for globals
        return None
    if isinstance(value, weakref.WeakValueDictionary):
        return [(one, f"[{key_of(one.key)}]") for one in value.valuerefs() if one() is not None]
    if isinstance(value, weakref.WeakKeyDictionary):
        refs = {id(one()): one for one in value.keyrefs()}
        return [part for key, item in value.items() for part in ((item, f"[{key_of(key)}]"), (refs[id(key)], "'s key"))]
    items = list(itertools.islice(value.items(), _ENTRIES))
    found = [(item, f"[{key_of(key)}]") for key, item in items]
    found += [(key, "'s key") for key, _ in items if not isinstance(key, (*SCALARS, tuple))]
    return [*found, *([(value.default_factory, "'s default")] if isinstance(value, collections.defaultdict) else [])]


def _of_items(value: Any) -> Parts:
    return [(item, f"[{place}]") for place, item in enumerate(itertools.islice(value, _ENTRIES + 1))]


def _of_builtin(value: Any) -> Parts | None:
    container = isinstance(value.__self__, list | tuple | dict | set | frozenset | collections.deque)
    reads = value.__name__ in _READERS or (container and value.__name__ not in _ADDERS)
    return [(value.__self__, "'s object")] if reads else None


def _of_cache(value: Any) -> Parts:
    """Return a function and its results that are kept: in a table, or in a bounded cache beside what links them."""
    referents = gc.get_referents(value)
    tables = [item for table in referents if type(table) is dict for item in table.values()]
    held = [*tables, *(one for one in referents if type(one) is not dict and not isinstance(one, type))]
    return [(value.__wrapped__, ""), *((item, "()") for item in held if "_lru" not in type(item).__name__)]


_PARTS: tuple[tuple[Any, Callable[[Any], Parts | None]], ...] = (
    (collections.abc.Mapping, _of_mapping),
    ((list, tuple, set, frozenset, collections.deque), _of_items),
    (collections.abc.MappingView, lambda one: [(getattr(one, "mapping", None), "'s table")]),
    (types.MethodType, lambda one: [(one.__func__, ""), (one.__self__, ".self")]),
    (functools.partial, lambda one: [(one.func, ""), (one.args, "'s arguments"), (one.keywords, "'s arguments")]),
    ((types.BuiltinMethodType, types.MethodWrapperType), _of_builtin),
    (weakref.ref, lambda one: [(one(), "()")]),
    (contextvars.ContextVar, lambda one: [(one.get(None), "")]),
    (enum.Enum, lambda one: [(one.name, ".name"), (one._value_, ".value")]),
    (type(functools.lru_cache(lambda: None)), _of_cache),
    (torch.amp.GradScaler, lambda one: [(fact, f".{name}") for name, fact in _scaler_facts(one).items()]),
)


def plain(value: Any) -> Any:
    """Return a scalar with its type. Here NaN equals itself, and zeros of two signs differ."""
    return type(value).__name__, repr(value) if isinstance(value, float | complex) else value


def alike(one: Any, other: Any) -> bool:
    """Return whether two objects are one, or scalars that no step could tell apart. Tensors are never compared."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, SCALARS) and plain(one) == plain(other)


def is_plain(value: Any, owner: type, depth: int = 0) -> bool:
    """Return whether code keeps such a value between two steps: a number, a text, a tensor, or some of these.

    Caches, locks, handles and other objects are not, but for those of the owner's own class: settings within settings.
    """
    if isinstance(value, (*SCALARS, torch.Tensor)) or number_of(value) is not None:
        return True
    if is_array(value):
        return not getattr(getattr(value, "dtype", None), "hasobject", False)
    if depth >= _NESTED:
        return False
    if isinstance(value, dict):
        return len(value) <= _ITEMS and all(is_plain(one, owner, depth + 1) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return len(value) <= _ITEMS and all(is_plain(one, owner, depth + 1) for one in value)
    return depth > 0 and type(value) is owner


class Slot:
    """What a slot holds: equal to the same object, or to a scalar like it."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and alike(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]


def key_of(key: Any) -> str:
    """Return what stands for a key of a mapping in names; of an object, which may print itself at length, its kind."""
    if isinstance(key, tuple):
        return f"({', '.join(map(key_of, key))})"
    return repr(key) if isinstance(key, (*SCALARS, enum.Enum)) else f"<{type(key).__name__}>"


def facts_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a recording froze of a tensor beside its identity: whether it is trained, and its view of its memory.

    An address alone would not do: ``tensor.t_()`` and ``tensor.resize_()`` leave it as it is.
    """
    return tensor.requires_grad, tensor.is_leaf, view_of(tensor)


def is_array(value: Any) -> bool:
    """Return whether a value is an array whose content changes in place, or memory in C."""
    numpy = sys.modules.get("numpy")
    return _is_plain_memory(value) or (numpy is not None and isinstance(value, numpy.ndarray))


def _is_plain_memory(value: Any) -> bool:
    c = sys.modules.get("_ctypes")
    in_c = c is not None and isinstance(value, c.Structure.__mro__[-2])  # the base of all, which has no name there
    return in_c or isinstance(value, bytearray | array.array | memoryview | mmap.mmap)


def content_of(value: Any) -> Any:
    """Return an array's dtype, shape and hash; `Unwatchable` for a large array and for an array of objects."""
    view = memoryview(value) if _is_plain_memory(value) else value
    if not _is_plain_memory(value) and value.dtype.hasobject:
        return Unwatchable("an array of objects")
    kind = getattr(value, "dtype", type(value).__name__)
    held = hashlib.blake2b(view.tobytes(), digest_size=16).digest() if view.nbytes <= _MOST_BYTES else b""
    content = str(kind), tuple(view.shape or ()), held
    return content if view.nbytes <= _BYTES else Unwatchable(f"an array of {view.nbytes // 2**10} KiB", content)


def number_of(value: Any) -> Any:
    """Return a scalar of numpy's as Python's; None for all else."""
    numpy = sys.modules.get("numpy")
    return (value.dtype.str, plain(value.item())) if numpy is not None and isinstance(value, numpy.generic) else None


def _scaler_facts(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return the settings of a GradScaler that a recording holds as numbers; its scale is in a tensor."""
    names = ("growth_factor", "backoff_factor", "growth_interval") if scaler.is_enabled() else ()
    return {"enabled": scaler.is_enabled(), **{name: getattr(scaler, f"get_{name}")() for name in names}}


def state_of(value: Any) -> Any:
    """Return how an array, a number of numpy's, a generator of random numbers or an iterator is; None for others."""
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):  # stepped inside the step, it would stand still
        return "schedule", value.last_epoch
    if isinstance(value, torch.Generator):  # of the user's own: no proof puts it back, and no recording draws from it
        state = value.get_state()
        numbers = super(torch.Tensor, state).numpy()  # past the method that is listened at while a step is audited
        return "random", hash(numbers.tobytes())
    if is_array(memory := _memory_of(value)):
        return content_of(memory)
    if isinstance(value, threading.Event):
        return "event", value.is_set()
    if isinstance(value, logging.Logger):
        return "level", value.getEffectiveLevel()
    number = number_of(value)
    return number if number is not None else _position_of(value)


def _memory_of(value: Any) -> Any:
    """Return the memory of a value that processes share (``multiprocessing.Value``) without its lock; else itself."""
    shared = sys.modules.get("multiprocessing.sharedctypes")
    return value.get_obj() if shared is not None and isinstance(value, shared.SynchronizedBase) else value


def _position_of(value: Any) -> Any:
    """Return the position of a generator or a stream; `Unknown` for what each read moves: iterators, files, queues."""
    if isinstance(value, random.Random):
        own = not isinstance(value, random.SystemRandom)  # the machine's has no state
        return ("random", hash(value.getstate())) if own else None
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState):
        return "random", str(value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state())
    if isinstance(value, io.StringIO | io.BytesIO):
        return "written up to", -1 if value.closed else value.tell()
    if isinstance(value, io.IOBase):  # which lines were read it does not always tell
        moves = value is not sys.stdin and not value.closed and value.readable()
    else:
        iterates = isinstance(value, collections.abc.Iterator) and not is_users_object(value)
        moves = iterates or isinstance(value, _TAKEN_FROM)
    return Unknown() if moves else None
