"""Looks through the Python state that a step can reach, and notes where it is held.

Reachable are the step's closure, the globals that its code names (also in modules of the user's), defaults and the
object that a method belongs to; the other state that the user named, and arguments that are objects; from there
functions and methods of the user's, containers, objects' and classes' attributes; and the attributes and hooks of
modules, optimizers and parameters.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.control import MethodEntry
from hotloop.step.guard import bytecode, fingerprint
from hotloop.step.guard.code_walk import DEPTH, CodeWalk
from hotloop.step.guard.fingerprint import ABSENT, SCALARS, Same, Unwatchable
from hotloop.step.guard.name_index import Mentions
from hotloop.step.guard.torch_walk import TorchWalk

if TYPE_CHECKING:
    from hotloop._torch.hooks import Accumulators
    from hotloop.step.state.holdings import Holdings

_ENTRIES = 20_000
"""Values looked at, at most; where there are more, no capture can be watched."""
_ITEMS = 200
"""Items of a container of scalars that are named one by one; of a longer one it is only known that it changed."""
_PLAIN = frozenset({*SCALARS, dict, list, tuple, set, frozenset, collections.deque, torch.Tensor, torch.nn.Parameter})
_BUILTIN = (*SCALARS, Mapping, list, tuple, set, frozenset, collections.deque, torch.Tensor, enum.Enum)
"""What a user's class may be built on, whose values are looked at as those are."""
_READERS = frozenset({"get", "items", "keys", "values", "index", "count", "__getitem__", "__contains__", "__len__"})
"""Methods of containers by which a step may hold one to read it."""


class Walk:
    """Looks through what code can reach. Attributes and methods count once their name stands in code that is reached.

    So a counter that the program keeps on its trainer, and that no code of the step mentions, is not the step's.

    Args:
        ignore: objects that are looked after elsewhere: the loop itself.
        holdings: what was given to the loop: modes of its modules and its tensors' memory are looked after elsewhere.
        accumulators: the hooks that no tensor tells of.
        home: the folder of the installed package that the step itself is of: its code is followed like a program's own.
        whole: look as well at parts of the given models that no code of the step names: it may change them.

    Attributes:
        found: what was reached, by a name that its author recognises; values compare with ``==``.
        tables: dictionaries that are compared as a whole; ``lists`` and ``sets`` alike.
        holders: attributes, and which of them count.
        typed: objects whose class may be replaced.
        computed: what has to be asked anew: positions of iterators, contents of arrays, slots.
        unread: names of what was found only in parts of models that no code of the step names.
        code: what functions and classes that were reached hold; ``torchs``: what torch's own objects do.
    """

    def __init__(
        self,
        ignore: Iterable[Any],
        holdings: Holdings,
        accumulators: Accumulators,
        home: str = "",
        *,
        whole: bool = True,
    ) -> None:
        self.found: dict[str, Any] = {}
        self.tables: list[dict[Any, Any]] = []
        self.holders: list[tuple[Mapping[str, Any], Callable[[str], bool]]] = []
        self.lists: list[Any] = []
        self.sets: list[Any] = []
        self.typed: list[Any] = []
        self.computed: list[Callable[[], Any]] = []
        self._paths: dict[int, str] = {}
        self._seen: dict[int, Any] = {id(one): one for one in ignore}  # which keeps them: an id is one's own for life
        self._on_builtins: dict[int, Any] = {}
        self._entries = 0
        self._mentions = Mentions()
        self.unread: frozenset[str] = frozenset()
        self._whole = whole
        self.code = CodeWalk(self, self._mentions, home)
        self.torchs = TorchWalk(self, self._mentions, holdings, accumulators)
        self.computed.append(accumulators.now)

    def once(self, value: Any) -> bool:
        """Tell whether an object comes up for the first time."""
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True

    def note(self, name: str, value: Any) -> None:
        """Add what was found; of two with one name (lambdas have no other) each counts."""
        free = name
        for number in itertools.count(2):
            if free not in self.found:
                break
            free = f"{name} ({number})"
        self.found[free] = value

    def finish(self) -> None:
        """Look at the modules that the loop was given, after all else, and at the code of all functions reached."""
        self.torchs.finish()
        self.code.finish()
        if self._whole:
            read = frozenset(self.found)
            self._mentions.follow_children()
            self.code.finish()
            self.unread = frozenset(self.found.keys() - read)

    def value(self, value: Any, name: str, depth: int, *, every: bool = False) -> None:
        """Note one value, and follow what it holds; ``every``: code that nobody follows may read all attributes."""
        if isinstance(value, MethodEntry):
            return
        if self._entries >= _ENTRIES:
            self.found["Python state"] = Unwatchable(f"more than {_ENTRIES:,} values")
            return
        self._entries += 1
        self._built_on(value, name, depth, every=every)
        if isinstance(value, SCALARS):
            self.note(name, fingerprint.plain(value))
            if isinstance(value, str):
                self._mentions.text(value)
        elif isinstance(value, Unwatchable):  # of a framework around us
            self.note(name, value)
        elif isinstance(value, torch.Tensor):
            self.torchs.tensor(value, name)
        elif self.torchs.is_given(value):
            self.note(name, Same(value))
        elif id(value) in self._seen:  # the same as under another name, which tells what it holds
            self.note(name, ("as", self._paths[id(value)]) if id(value) in self._paths else Same(value))
        elif depth > DEPTH:
            self.note(name, Unwatchable("nested too deep"))
        else:
            self._paths[id(value)] = name
            self._follow(value, name, depth, every=every)

    def _follow(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        if isinstance(value, types.FunctionType | types.MethodType):
            self.note(name, getattr(value, "__code__", None) if bytecode.is_users(value) else Same(value))
            if bytecode.is_users(value):
                self.code.function(value, name, depth)
        elif isinstance(value, type) and fingerprint.is_users_class(value):
            self.note(name, Same(value))
            self.code.class_of(value, depth + 1)
            self.code.constructors_of(value, depth + 1)
        elif isinstance(value, torch.nn.Module):
            self.torchs.module(value, name)
        elif isinstance(value, functools.partial):
            self.value(value.func, name, depth + 1)
            self.value((value.args, value.keywords), f"an argument of {name or 'the step'}", depth + 1)
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self.note(name, Same(value))
            self._mentions.add(bytecode.asked_for(value))
        elif isinstance(value, weakref.ref):
            self.note(name, Same(value))
            self.value(value(), f"{name}()", depth + 1, every=every)
        elif isinstance(value, contextvars.ContextVar):
            self.computed.append(lambda: fingerprint.Slot(value.get(ABSENT)))
            self.value(value.get(ABSENT), name, depth + 1, every=every)
        elif isinstance(value, types.BuiltinMethodType) and value.__name__ in _READERS:
            self.note(name, value.__name__)  # table.get is made anew each time that it is asked for
            self.value(value.__self__, f"{name}'s object", depth + 1)
        else:
            self._seen[id(value)] = value
            self._object(value, name, depth, every=every)

    def _built_on(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        """Follow what a user's class adds to one of Python's or torch's: named tuples, enums, a dict of one's own."""
        if type(value) in _PLAIN or not isinstance(value, _BUILTIN) or not fingerprint.is_users_class(type(value)):
            return
        self.code.class_of(type(value), depth + 1)
        if id(value) in self._seen or id(value) in self._on_builtins:
            return
        self._on_builtins[id(value)] = value
        if isinstance(value, enum.Enum):  # a descriptor gives it under another name
            follow = functools.partial(self.value, value._value_, f"{name}.value", depth + 1, every=every)
            self._mentions.follow("value", follow)
        if hasattr(value, "__dict__") and not isinstance(value, dict | torch.Tensor):
            self.fields(vars(value), name, depth, every=every)

    def _object(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        if isinstance(value, Mapping):
            self._mapping(value, name, depth, every=every)
        elif isinstance(value, list | tuple | collections.deque):
            self._sequence(value, name, depth, every=every)
        elif isinstance(value, set | frozenset):
            self._set(value, name, depth, every=every)
        elif isinstance(value, torch.amp.GradScaler):
            for key, fact in fingerprint.scaler_facts(value).items():
                self.note(f"{name}.{key}", fact)
            self.computed.append(functools.partial(fingerprint.scaler_facts, value))
        elif (state := fingerprint.state_of(value)) is not None:
            self.note(name, state)
            self.computed.append(functools.partial(fingerprint.state_of, value))
            if isinstance(value, types.GeneratorType):
                self._generator(value, name, depth)
        elif isinstance(value, torch.optim.Optimizer) and fingerprint.is_users_class(type(value)):
            self.torchs.wrapping(value, name, depth)
        elif fingerprint.is_users_object(value) and not isinstance(value, enum.Enum):
            self._instance(value, name, depth, every=every)
        else:
            self.note(name, Same(value))

    def _generator(self, value: types.GeneratorType[Any, Any, Any], name: str, depth: int) -> None:
        self.computed.append(functools.partial(fingerprint.variables_now, value))
        for key, item in fingerprint.variables_of(value).items():
            self.value(item, f"{name}: {key}", depth + 1)
        self.code.generator(value, name)

    def _set(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.sets.append(value)
        self.note(name, frozenset(value))
        if not all(isinstance(one, SCALARS) for one in value):
            for item in value:
                self.value(item, f"an item of {name}", depth + 1, every=every)

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int, *, every: bool) -> None:
        order = tuple(value) if len(value) <= _ITEMS and all(isinstance(key, SCALARS) for key in value) else ()
        self.note(name, ("length", len(value), order))
        if isinstance(value, dict) and hasattr(value, "__dict__"):
            self.fields(vars(value), name, depth, every=every)
        if isinstance(value, collections.defaultdict):
            self.computed.append(lambda: Same(value.default_factory))
            self.value(value.default_factory, f"{name}.default_factory", depth + 1, every=every)
        if isinstance(value, dict):
            self.tables.append(value)
        else:
            self.computed.append(lambda: [(key, Same(item)) for key, item in value.items()])
        for key, item in list(value.items()):
            if not isinstance(key, SCALARS):  # what an entry is called tells nothing of it
                self.value(key, f"a key of {name}", depth + 1, every=every)
            self.value(item, f"{name}[{fingerprint.key_of(key)}]", depth + 1, every=every)

    def _sequence(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.note(name, ("length", len(value)))
        if not isinstance(value, tuple):
            self.lists.append(value)
        if len(value) > _ITEMS and len(value) <= _ENTRIES and all(isinstance(one, SCALARS) for one in value):
            self.note(f"an item of {name}", [fingerprint.plain(one) for one in value])
            return
        for index, item in enumerate(itertools.islice(value, _ENTRIES + 1)):
            self.value(item, f"{name}[{index}]", depth + 1, every=every)

    def _instance(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.note(name, type(value).__qualname__)
        self.typed.append(value)
        self.code.class_of(type(value), depth + 1)
        slots = fingerprint.slots_of(type(value))
        fields = vars(value) if hasattr(value, "__dict__") else {}
        slotted = {key: getattr(value, key, ABSENT) for key in slots}
        kept = self.code.kept_by_libraries(value, {**fields, **slotted})
        if hasattr(value, "__dict__"):
            self.fields(fields, name, depth, every=every, kept=kept)
        if slots:
            self.computed.append(
                lambda: [
                    fingerprint.Slot(getattr(value, key, ABSENT))
                    for key in slots
                    if key in kept or self._mentions.may_read(key)
                ]
            )
        self.follow_all({key: getattr(value, key, None) for key in slots}, name, depth, every=every, kept=kept)

    def fields(
        self,
        holder: dict[str, Any],
        name: str,
        depth: int,
        *,
        every: bool = False,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """Follow attributes: all of an object that was given as state, else those that code names, and ``kept``."""
        self.holders.append((holder, _any if every else lambda key: key in kept or self._mentions.may_read(key)))
        self.follow_all(holder, name, depth, every=every, kept=kept)

    def follow_all(
        self, fields: Mapping[str, Any], name: str, depth: int, *, every: bool, kept: frozenset[str]
    ) -> None:
        """Follow values by their attributes' names: all, or those that are ``kept`` or that code names."""
        for key, item in list(fields.items()):
            follow = functools.partial(self.value, item, f"{name}.{key}", depth + 1, every=every)
            if every or key in kept:
                follow()
            else:
                self._mentions.follow(key, follow)


def _any(_: str) -> bool:
    return True
