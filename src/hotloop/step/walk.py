"""Looks through the Python state that a step can reach, and notes where it is held.

Reachable are the step's closure, the globals that its code names (also in modules of the user's), defaults and the
object that a method belongs to; the other state that the user named, and arguments that are objects; from there
functions and methods of the user's, containers, objects' and classes' attributes; and the attributes and hooks of
modules, optimizers and parameters.
"""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import hooks
from hotloop._torch.graphs import is_own_file, is_user_file
from hotloop.control import MethodEntry
from hotloop.step import reading, standins
from hotloop.step.standins import ABSENT, SCALARS, Same, Unwatchable

if TYPE_CHECKING:
    from hotloop.step.holdings import Holdings

_DEPTH = 24
_ENTRIES = 20_000
"""Values looked at, at most; where there are more, no capture can be watched."""
_ITEMS = 200
"""Items of a container of scalars that are named one by one; of a longer one it is only known that it changed."""
_NOT_IN_STEPS = ("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__reduce__", "__getstate__")
"""Methods that Python calls by itself, but not of an object that a step uses."""
_LOOKS_AT_ALL = frozenset({"vars", "__dict__"})
"""Code that names one of these may read any attribute."""
_TORCHS = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, which are looked at as what they are: parameters, hooks, the mode."""


class Walk:
    """Looks through what code can reach. Attributes and methods count once their name stands in code that is reached.

    So a counter that the program keeps on its trainer, and that no code of the step mentions, is not the step's.

    Args:
        ignore: objects that are looked after elsewhere: the loop itself.
        holdings: what was given to the loop: modes of its modules and its tensors' memory are looked after elsewhere.

    Attributes:
        found: what was reached, by a name that its author recognises; values compare with ``==``.
        tables: dictionaries that are compared as a whole; ``lists`` and ``sets`` alike.
        globals: variables outside of functions, and which of them count.
        holders: attributes, and which of them count.
        cells: what closures hold.
        functions: functions whose code may be replaced; ``typed``: objects whose class may be.
        tensors: those that nobody else watches; ``buffers``: those of modules that the loop was not given.
        computed: what has to be asked anew: positions of iterators, contents of arrays, slots.
    """

    def __init__(self, ignore: Iterable[Any], holdings: Holdings) -> None:
        self.found: dict[str, Any] = {}
        self.tables: list[dict[Any, Any]] = []
        self.globals: list[tuple[Mapping[str, Any], list[str]]] = []
        self.holders: list[tuple[Mapping[str, Any], Callable[[str], bool]]] = []
        self.cells: list[types.CellType] = []
        self.lists: list[Any] = []
        self.sets: list[Any] = []
        self.functions: list[types.FunctionType] = []
        self.typed: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.computed: list[Callable[[], Any]] = []
        self._modules = holdings.modules
        self._given = {id(child) for one in self._modules.values() for child in one.modules()}
        held = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        self._held = {id(one) for tensors in held for one in tensors.values()}
        self._paths: dict[int, str] = {}
        self._classes: set[type] = set()
        self._forwards: set[type] = set()
        self._queue: collections.deque[tuple[types.FunctionType, str]] = collections.deque()
        self._seen: dict[int, Any] = {id(one): one for one in ignore}  # which keeps them: an id is one's own for life
        self._names: set[str] = {"forward"}  # which torch calls
        self._waiting: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)
        self._entries = 0

    def mentions(self, attribute: str) -> bool:
        """Tell whether code that was reached may read an attribute of this name."""
        if attribute in self._names or not _LOOKS_AT_ALL.isdisjoint(self._names):
            return True
        return attribute.startswith("__") and attribute not in _NOT_IN_STEPS

    def _attribute(self, name: str, follow: Callable[[], None]) -> None:
        """Follow an attribute or method, now or when its name comes up."""
        if self.mentions(name):
            follow()
        else:
            self._waiting[name].append(follow)

    def _mention(self, names: Iterable[str]) -> None:
        fresh = set(names) - self._names
        self._names |= fresh
        every = not _LOOKS_AT_ALL.isdisjoint(self._names)
        for name in list(self._waiting) if every else sorted(fresh & self._waiting.keys()):
            for follow in self._waiting.pop(name, ()):
                follow()

    def _once(self, value: Any) -> bool:
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

    # -- code ------------------------------------------------------------------------------------------------------

    def function(self, function: Any, name: str, depth: int) -> None:
        """Follow a function into what it closes over, the globals it names, its defaults and its object."""
        if isinstance(function, types.MethodType):
            self.value(function.__self__, _dotted(name, "self"), depth + 1)
            function = function.__func__
        chain = reading.wrapped(function)
        for one in reversed(chain):
            if not isinstance(one, types.FunctionType):
                self.value(one, name, depth)
            elif (one is chain[-1] or is_user_file(one.__code__.co_filename)) and self._once(one):
                self._queue.append((one, f" (in {name})" if name else ""))

    def finish(self) -> None:
        """Look at the modules that the loop was given, after all else, and at the code of all functions reached."""
        for name, module in self._modules.items():
            self._walk_module(module, name)
        while self._queue:  # one after the other: calls may be nested deeper than Python allows
            self._reads(*self._queue.popleft())

    def _reads(self, function: types.FunctionType, inside: str) -> None:
        code, outside, depth = function.__code__, function.__globals__, 1
        self._mention(reading.attributes(code))
        self.functions.append(function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append(cell)
            self.value(reading.content(cell), f"closure variable {variable}{inside}", depth)
        variables = [name for name in reading.names(code) if name in outside]
        self.globals.append((outside, variables))
        for variable in variables:
            found = outside[variable]
            if isinstance(found, types.ModuleType):
                self._module_reads(found, code, variable, inside, depth)
            else:
                self.value(found, f"global {variable}{inside}", depth)
        if function.__kwdefaults__:
            self.tables.append(function.__kwdefaults__)
        defaults = (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        for key, default in defaults:
            self.value(default, f"default {key}{inside}", depth)
        self._fields(vars(function), function.__qualname__, depth)

    def _module_reads(self, module: types.ModuleType, code: types.CodeType, name: str, inside: str, depth: int) -> None:
        """Note what code may take from a module of the user's: each of its own names that stands in the code."""
        if depth > _DEPTH or not is_own_file(getattr(module, "__file__", None) or "<built in>"):
            return
        known = [name for name in reading.attributes(code) if name in vars(module)]
        self.globals.append((vars(module), known))
        for attribute in known:
            found = vars(module)[attribute]
            if isinstance(found, types.ModuleType):
                self._module_reads(found, code, f"{name}.{attribute}", inside, depth + 1)
            else:
                self.value(found, f"{name}.{attribute}{inside}", depth)

    def class_of(self, cls: type, depth: int) -> None:
        """Follow the methods of a user's class, each of which may be called, and its attributes."""
        for base in cls.__mro__:
            if base in self._classes:
                continue
            self._classes.add(base)
            if not standins.is_users_class(base):
                self._properties(base)
                continue
            self.holders.append((vars(base), self.mentions))
            for key, member in list(vars(base).items()):
                function = reading.function_of(member)
                if isinstance(function, types.FunctionType):
                    self._attribute(key, functools.partial(self._method, function, f"{base.__name__}.{key}", depth))
                elif not key.startswith("__") and not isinstance(member, types.MemberDescriptorType):
                    self._attribute(key, functools.partial(self.value, member, f"{base.__name__}.{key}", depth + 1))

    def _method(self, function: types.FunctionType, name: str, depth: int) -> None:
        self.note(name, Same(function))
        if is_own_file(reading.file_of(function)):
            self.function(function, function.__qualname__, depth)

    def _properties(self, cls: type) -> None:
        """Follow a library's properties to what they are made of: who reads ``hparams`` reads ``_hparams``."""
        for key, member in list(vars(cls).items()):
            getter = reading.function_of(member) if isinstance(member, property | functools.cached_property) else None
            if isinstance(getter, types.FunctionType):
                self._attribute(key, functools.partial(self._mention, reading.attributes(getter.__code__)))

    # -- torch's own -----------------------------------------------------------------------------------------------

    def _walk_module(self, module: torch.nn.Module, name: str) -> None:
        """Note the plain attributes of a module and its children, their tensors, and what their hooks reach."""
        for path, child in module.named_modules(prefix=name):
            if not self._once(child):
                continue
            self.note(path, type(child).__qualname__)
            self.typed.append(child)
            self.class_of(type(child), 1)
            if type(child) not in self._forwards:
                self._forwards.add(type(child))
                self.computed.append(functools.partial(standins.forward_of, type(child)))
                self.note(f"{type(child).__qualname__}.forward", Same(type(child).forward))
            parameters, buffers, children = hooks.module_tables(child)
            self.tables += parameters, buffers, children
            self.buffers += [one for one in buffers.values() if one is not None and id(one) not in self._held]
            for key, tensor in (*parameters.items(), *buffers.items()):
                self._tensor(tensor, f"{path}.{key}")
            self.hooks(hooks.module_hooks(child), path)
            self._own_attributes(child, path)

    def _own_attributes(self, module: torch.nn.Module, path: str) -> None:
        attributes, strange = vars(module), id(module) not in self._given
        users = is_own_file(reading.file_of(type(module).forward))
        if strange:  # else the mode is part of the key of a call
            self.note(f"{path}.training", module.training)

        def counts(key: str) -> bool:
            if key in _TORCHS or isinstance(attributes.get(key), MethodEntry):  # ours come and go with a tier
                return key == "training" and strange
            # Code of libraries is not followed, and may read anything that is public.
            return self.mentions(key) if users or key.startswith("_") else True

        self.holders.append((attributes, counts))
        for key, value in list(attributes.items()):
            if key in _TORCHS:
                continue
            if users or key.startswith("_"):
                self._attribute(key, functools.partial(self.value, value, f"{path}.{key}", 2))
            elif isinstance(value, SCALARS):
                self.note(f"{path}.{key}", standins.plain(value))
            elif counts(key):
                self.value(value, f"{path}.{key}", 2, every=True)

    def _tensor(self, tensor: Any, name: str) -> None:
        """Note a tensor: another one under the name is not the one that was captured."""
        if not isinstance(tensor, torch.Tensor):
            self.note(name, tensor)
            return
        facts = None
        if id(tensor) not in self._held:  # else its memory and flags are looked at elsewhere
            facts = standins.facts_of(tensor)
            self.tensors.append(tensor)
        self.note(name, Same(tensor, facts))
        for function in hooks.gradient_hook_functions(tensor):
            self.value(function, f"a gradient hook of {name}", 1)

    def hooks(self, tables: Iterable[dict[Any, Any]], owner: str) -> None:
        """Note the hooks that are the user's, and follow them; ours come and go."""
        for table in tables:
            self.tables.append(table)
            users = [hook for hook in table.values() if not _is_ours(hook)]
            for hook in users:
                self.note(f"a hook of {owner}", Same(hook))
                self.function(hook, f"a hook of {owner}", 1)

    def optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Note the hooks of an optimizer, and a step of its own that somebody has set: schedulers do."""
        self.hooks(hooks.optimizer_hooks(optimizer), name)
        own = functools.partial(standins.own_step, optimizer)
        self.note(f"{name}.step", own())
        self.computed.append(own)

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, value: Any, name: str, depth: int, *, every: bool = False) -> None:
        """Note one value, and follow what it holds; ``every``: code that nobody follows may read all attributes."""
        if isinstance(value, MethodEntry):
            return
        if self._entries >= _ENTRIES:
            self.found["Python state"] = Unwatchable(f"more than {_ENTRIES:,} values")
            return
        self._entries += 1
        if isinstance(value, SCALARS):
            self.note(name, standins.plain(value))
        elif isinstance(value, Unwatchable):  # of a framework around us
            self.note(name, value)
        elif isinstance(value, torch.Tensor):
            self._tensor(value, name)
        elif id(value) in self._given:
            self.note(name, Same(value))
        elif id(value) in self._seen:  # the same as under another name, which tells what it holds
            self.note(name, ("as", self._paths[id(value)]) if id(value) in self._paths else Same(value))
        elif depth > _DEPTH:
            self.note(name, Unwatchable("nested too deep"))
        else:
            self._paths[id(value)] = name
            self._follow(value, name, depth, every=every)

    def _follow(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        if isinstance(value, types.FunctionType | types.MethodType):
            self.note(name, getattr(value, "__code__", None) if reading.is_users(value) else Same(value))
            if reading.is_users(value):
                self.function(value, name, depth)
        elif isinstance(value, type) and standins.is_users_class(value):
            self.note(name, Same(value))
            self.class_of(value, depth + 1)
        elif isinstance(value, torch.nn.Module):
            self._walk_module(value, name)
        elif isinstance(value, functools.partial):
            self.value(value.func, name, depth + 1)
            self.value((value.args, value.keywords), f"an argument of {name}", depth + 1)
        else:
            self._seen[id(value)] = value
            self._object(value, name, depth, every=every)

    def _object(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        if isinstance(value, Mapping):
            self._mapping(value, name, depth, every=every)
        elif isinstance(value, list | tuple | collections.deque):
            self._sequence(value, name, depth, every=every)
        elif isinstance(value, set | frozenset):
            self._set(value, name, depth, every=every)
        elif isinstance(value, torch.amp.GradScaler):
            for key, fact in standins.scaler_facts(value).items():
                self.note(f"{name}.{key}", fact)
            self.computed.append(functools.partial(standins.scaler_facts, value))
        elif (state := standins.state_of(value)) is not None:
            self.note(name, state)
            self.computed.append(functools.partial(standins.state_of, value))
            for key, item in standins.variables_of(value).items():
                self.value(item, f"{name}: {key}", depth + 1)
        elif standins.is_users_object(value) and not isinstance(value, enum.Enum):
            self._instance(value, name, depth, every=every)
        else:
            self.note(name, Same(value))

    def _set(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.sets.append(value)
        self.note(name, frozenset(value))
        if not all(isinstance(one, SCALARS) for one in value):
            for item in value:
                self.value(item, f"an item of {name}", depth + 1, every=every)

    def _mapping(self, value: Mapping[Any, Any], name: str, depth: int, *, every: bool) -> None:
        self.note(name, ("length", len(value)))
        if isinstance(value, dict):
            self.tables.append(value)
        else:
            self.computed.append(lambda: [(key, Same(item)) for key, item in value.items()])
        for key, item in list(value.items()):
            self.value(item, f"{name}[{key!r}]", depth + 1, every=every)

    def _sequence(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.note(name, ("length", len(value)))
        if not isinstance(value, tuple):
            self.lists.append(value)
        if len(value) > _ITEMS and len(value) <= _ENTRIES and all(isinstance(one, SCALARS) for one in value):
            self.note(f"an item of {name}", [standins.plain(one) for one in value])
            return
        for index, item in enumerate(itertools.islice(value, _ENTRIES + 1)):
            self.value(item, f"{name}[{index}]", depth + 1, every=every)

    def _instance(self, value: Any, name: str, depth: int, *, every: bool) -> None:
        self.note(name, type(value).__qualname__)
        self.typed.append(value)
        self.class_of(type(value), depth + 1)
        if hasattr(value, "__dict__"):
            self._fields(vars(value), name, depth, every=every)
        if slots := standins.slots_of(type(value)):
            self.computed.append(
                lambda: [standins.Slot(getattr(value, key, ABSENT)) for key in slots if self.mentions(key)]
            )
        self._follow_all({key: getattr(value, key, None) for key in slots}, name, depth, every=every)

    def _fields(self, holder: dict[str, Any], name: str, depth: int, *, every: bool = False) -> None:
        """Follow attributes: all of an object whose code is a library's, else those that the code names."""
        self.holders.append((holder, _any if every else self.mentions))
        self._follow_all(holder, name, depth, every=every)

    def _follow_all(self, fields: Mapping[str, Any], name: str, depth: int, *, every: bool) -> None:
        for key, item in list(fields.items()):
            follow = functools.partial(self.value, item, f"{name}.{key}", depth + 1, every=every)
            if every:
                follow()
            else:
                self._attribute(key, follow)


def _any(_: str) -> bool:
    return True


def _is_ours(hook: Any) -> bool:
    inner = reading.wrapped(getattr(hook, "func", hook))[-1]
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "hotloop"


def _dotted(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
