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
import os
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import hooks
from hotloop._torch.graphs import is_own_file, is_user_file
from hotloop._torch.module import get_entry
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
_READERS = frozenset({"get", "items", "keys", "values", "index", "count", "__getitem__", "__contains__", "__len__"})
"""Methods of containers by which a step may hold one to read it."""
_TORCHS = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, which are looked at as what they are: parameters, hooks, the mode."""
_OURS = "_hotloop"
"""What hotloop itself notes on a module begins so, and comes and goes with a tier."""
_WRAPPED = frozenset({"step", "zero_grad"})
"""Attributes of optimizers that schedulers and others wrap."""
_OPTIMIZERS = _WRAPPED | {"param_groups", "state"}
"""These, and what is looked at as what it is."""


class Walk:
    """Looks through what code can reach. Attributes and methods count once their name stands in code that is reached.

    So a counter that the program keeps on its trainer, and that no code of the step mentions, is not the step's.

    Args:
        ignore: objects that are looked after elsewhere: the loop itself.
        holdings: what was given to the loop: modes of its modules and its tensors' memory are looked after elsewhere.
        home: the folder of the installed package that the step itself is of: its code is followed like a program's own.

    Attributes:
        found: what was reached, by a name that its author recognises; values compare with ``==``.
        tables: dictionaries that are compared as a whole; ``lists`` and ``sets`` alike.
        globals: variables outside of functions, and which of them count.
        holders: attributes, and which of them count.
        cells: what closures hold.
        functions: functions whose code may be replaced; ``typed``: objects whose class may be.
        tensors: those that nobody else watches; ``buffers``: those of modules that the loop was not given.
        strangers: trained tensors that nobody gave to the loop, by name: a step may leave gradients in them.
        computed: what has to be asked anew: positions of iterators, contents of arrays, slots.
    """

    def __init__(self, ignore: Iterable[Any], holdings: Holdings, home: str = "") -> None:
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
        self.strangers: dict[str, Any] = {}
        self.computed: list[Callable[[], Any]] = []
        self._home = home
        self._modules = holdings.modules
        self._given = {id(child) for one in self._modules.values() for child in one.modules()}
        held = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        self._held = {id(one) for tensors in held for one in tensors.values()}
        self._paths: dict[int, str] = {}
        self._classes: set[type] = set()
        self._forwards: set[type] = set()
        self._own_classes: dict[type, bool] = {}
        self._inherited: set[type] = set()
        self._optimizers = {id(part) for one in holdings.optimizers.values() for part in (one.param_groups, one.state)}
        """Groups and state of the optimizers that were given, which one around them may have as well."""
        self._queue: collections.deque[tuple[types.FunctionType, str]] = collections.deque()
        self._seen: dict[int, Any] = {id(one): one for one in ignore}  # which keeps them: an id is one's own for life
        self._names: set[str] = {"forward"}  # which torch calls
        self._beginnings: set[str] = set()
        """Of names that code puts together: ``getattr(self, f"weight_{index}")``."""
        self._waiting: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)
        self._entries = 0

    def _is_own(self, file: str) -> bool:
        """Tell whether code in a file is followed: the program's own, also where the program itself is installed."""
        return is_own_file(file) or (bool(self._home) and file.startswith(self._home))

    def is_own_object(self, value: Any) -> bool:
        """Tell whether the code of an object's class is followed, so that it is known which attributes it reads."""
        return any(map(self._has_own_code, type(value).__mro__))

    def _has_own_code(self, cls: type) -> bool:
        """Tell whether the code that a class itself adds to its bases is followed."""
        if cls not in self._own_classes:
            members = map(reading.function_of, list(vars(cls).values()))
            files = (reading.file_of(one) for one in members if isinstance(one, types.FunctionType))
            self._own_classes[cls] = any(map(self._is_own, files))
        return self._own_classes[cls]

    def mentions(self, attribute: str) -> bool:
        """Tell whether code that was reached may read an attribute of this name."""
        if attribute in self._names or not _LOOKS_AT_ALL.isdisjoint(self._names):
            return True
        if attribute.startswith("__"):
            return attribute not in _NOT_IN_STEPS
        return any(attribute.startswith(one) for one in self._beginnings)

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
        if not every and self._beginnings:
            fresh |= {name for name in self._waiting if self.mentions(name)}
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
        self._beginnings.update(reading.beginnings(code))
        self._mention(reading.attributes(code))
        self.functions.append(function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append(cell)
            held = reading.content(cell)
            if isinstance(held, types.ModuleType):
                self._module_reads(held, code, f"closure variable {variable}", inside, depth)
            else:
                self.value(held, f"closure variable {variable}{inside}", depth)
        for module in reading.imports(function):
            self._module_reads(module, code, module.__name__, inside, depth)
        self._environment(code)
        texts = reading.attributes(code) if "globals" in reading.names(code) else ()  # globals()["weight"]
        variables = [name for name in sorted({*reading.names(code), *texts}) if name in outside]
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

    def _environment(self, code: types.CodeType) -> None:
        """Note the environment variables whose names stand in code that may read them."""
        texts = reading.attributes(code)
        if not {"environ", "getenv"}.isdisjoint(texts):
            for name in texts:
                if name in os.environ:
                    self.note(f"environment variable {name}", os.environ[name])
            self.computed.append(lambda: [os.environ.get(name) for name in texts])

    def _module_reads(self, module: types.ModuleType, code: types.CodeType, name: str, inside: str, depth: int) -> None:
        """Note what code may take from a module of the user's: each of its own names that stands in the code."""
        if depth > _DEPTH or not self._is_own(getattr(module, "__file__", None) or "<built in>"):
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
        users = any(map(self._has_own_code, cls.__mro__))
        for base in cls.__mro__:
            if users and base not in self._inherited and not self._has_own_code(base):
                self._inherited.add(base)
                self._inherit(base)
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
        if self._is_own(reading.file_of(function)):
            self.function(function, function.__qualname__, depth)

    def _inherit(self, cls: type) -> None:
        """Take what methods of a library's class name for named, as far as code that was reached may call them.

        Of an object of such a class all is looked at that it may keep; of one whose class is the user's, what is named.
        """
        if cls is torch.nn.Module or standins.is_frameworks(cls):  # what they keep is looked at as what it is
            return
        for key, member in list(vars(cls).items()):
            function = reading.function_of(member)
            inner = reading.wrapped(function)[-1] if isinstance(function, types.FunctionType) else None
            if isinstance(inner, types.FunctionType):
                # A library that looks at all attributes does so for itself: that is no reason to count all of a user's.
                names = set(reading.attributes(inner.__code__)) - _LOOKS_AT_ALL
                self._attribute(key, functools.partial(self._mention, names))

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
        attributes, cls, strange = vars(module), type(module), id(module) not in self._given
        users = self._is_own(reading.file_of(cls.forward))
        kept = set() if users else _kept(module)
        if strange:  # else the mode is part of the key of a call
            self.note(f"{path}.training", module.training)

        def counts(key: str) -> bool:
            if key in _TORCHS or _of_a_tier(module, key):
                return key == "training" and strange
            # Code of libraries is not followed: it may read anything that is public, and what it keeps for itself.
            return self.mentions(key) if named(key) else True

        def named(key: str) -> bool:
            return users or (key.startswith("_") and key not in kept)

        self.holders.append((attributes, counts))
        for key, value in list(attributes.items()):
            if key in _TORCHS or _of_a_tier(module, key):
                continue
            if named(key):
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
            if tensor.requires_grad and tensor.is_leaf:
                self.strangers[name] = tensor
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
        """Note what the step's code reads of an optimizer, its hooks, and a step that somebody set: schedulers do."""
        attributes = vars(optimizer)
        self.holders.append((attributes, lambda key: key not in _OPTIMIZERS and self.mentions(key)))
        for key, value in list(attributes.items()):
            if key not in _OPTIMIZERS:
                self._attribute(key, functools.partial(self.value, value, f"{name}.{key}", 1))
        self.hooks(hooks.optimizer_hooks(optimizer), name)
        own = functools.partial(standins.own_step, optimizer)
        self.note(f"{name}.step", own())
        self.computed.append(own)

    def _wrapping(self, optimizer: torch.optim.Optimizer, name: str, depth: int) -> None:
        """Note what an optimizer keeps that nobody gave to the loop: one around another (Lookahead) counts its steps.

        One that steps itself is seen where it does.
        """
        self.note(name, Same(optimizer))
        attributes, cls = vars(optimizer), type(optimizer)
        self.class_of(cls, depth + 1)
        left_out = _WRAPPED | {key for key, value in attributes.items() if id(value) in self._optimizers}
        plain = frozenset() if self.is_own_object(optimizer) else frozenset(standins.plain_ones(attributes, cls))
        kept = plain - left_out
        self.holders.append((attributes, lambda key: key not in left_out and (key in kept or self.mentions(key))))
        fields = {key: value for key, value in attributes.items() if key not in left_out}
        self._follow_all(fields, name, depth, every=False, kept=kept)

    def settings(self, optimizer: torch.optim.Optimizer, name: str, left_out: Iterable[str]) -> None:
        """Note what the step's code reads of parameter groups; what is ``left_out`` is looked at elsewhere."""
        without = {"params", *left_out}

        def counts(key: str) -> bool:
            return key not in without and self.mentions("param_groups") and self.mentions(key)

        for index, group in enumerate(optimizer.param_groups):
            self.holders.append((group, counts))
            for key, value in group.items():
                follow = functools.partial(self.value, value, f"{name}.param_groups[{index}][{key!r}]", 1)
                if key not in without:
                    self._attribute("param_groups", functools.partial(self._attribute, key, follow))

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
        elif isinstance(value, weakref.ref):
            self.note(name, Same(value))
            self.value(value(), f"{name}()", depth + 1, every=every)
        elif isinstance(value, contextvars.ContextVar):
            self.computed.append(lambda: standins.Slot(value.get(ABSENT)))
            self.value(value.get(ABSENT), name, depth + 1, every=every)
        elif isinstance(value, types.BuiltinMethodType) and value.__name__ in _READERS:
            self.note(name, value.__name__)  # table.get is made anew each time that it is asked for
            self.value(value.__self__, f"{name}'s object", depth + 1)
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
        elif isinstance(value, torch.optim.Optimizer) and standins.is_users_class(type(value)):
            self._wrapping(value, name, depth)
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
        if isinstance(value, dict) and hasattr(value, "__dict__"):
            self._fields(vars(value), name, depth, every=every)
        if isinstance(value, dict):
            self.tables.append(value)
        else:
            self.computed.append(lambda: [(key, Same(item)) for key, item in value.items()])
        for key, item in list(value.items()):
            if not isinstance(key, SCALARS):  # what an entry is called tells nothing of it
                self.value(key, f"a key of {name}", depth + 1, every=every)
            self.value(item, f"{name}[{standins.key_of(key)}]", depth + 1, every=every)

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
        slots = standins.slots_of(type(value))
        fields = vars(value) if hasattr(value, "__dict__") else {}
        slotted = {key: getattr(value, key, ABSENT) for key in slots}
        # Code of libraries is not followed: it may read and change whatever it keeps there.
        kept = frozenset(() if self.is_own_object(value) else standins.plain_ones({**fields, **slotted}, type(value)))
        if hasattr(value, "__dict__"):
            self._fields(fields, name, depth, every=every, kept=kept)
        if slots:
            self.computed.append(
                lambda: [
                    standins.Slot(getattr(value, key, ABSENT)) for key in slots if key in kept or self.mentions(key)
                ]
            )
        self._follow_all({key: getattr(value, key, None) for key in slots}, name, depth, every=every, kept=kept)

    def _fields(
        self,
        holder: dict[str, Any],
        name: str,
        depth: int,
        *,
        every: bool = False,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """Follow attributes: all of an object that was given as state, else those that code names, and ``kept``."""
        self.holders.append((holder, _any if every else lambda key: key in kept or self.mentions(key)))
        self._follow_all(holder, name, depth, every=every, kept=kept)

    def _follow_all(
        self, fields: Mapping[str, Any], name: str, depth: int, *, every: bool, kept: frozenset[str]
    ) -> None:
        for key, item in list(fields.items()):
            follow = functools.partial(self.value, item, f"{name}.{key}", depth + 1, every=every)
            if every or key in kept:
                follow()
            else:
                self._attribute(key, follow)


def _kept(module: torch.nn.Module) -> set[str]:
    """Name what a module of a library, not one of torch's, keeps for itself beside what every module has."""
    if not standins.is_users_class(type(module)):
        return set()
    own = {key: value for key, value in vars(module).items() if key not in _TORCHS and not key.startswith(_OURS)}
    return standins.plain_ones(own, type(module))


def _of_a_tier(module: torch.nn.Module, key: str) -> bool:
    """Tell whether an attribute is hotloop's, or what the module's call is routed to: they come and go with a tier."""
    value = vars(module).get(key)
    return key.startswith(_OURS) or isinstance(value, MethodEntry) or (value is not None and value is get_entry(module))


def _any(_: str) -> bool:
    return True


def _is_ours(hook: Any) -> bool:
    inner = reading.wrapped(getattr(hook, "func", hook))[-1]
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "hotloop"


def _dotted(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
