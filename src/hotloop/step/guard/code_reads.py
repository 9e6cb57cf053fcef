"""Follows what code reads: from its globals, closure and arguments, attribute by attribute, as its names lead on."""

from __future__ import annotations

import collections
import collections.abc
import functools
import gc
import os
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import FunctionCtx
from torch.optim.lr_scheduler import LRScheduler

from hotloop._torch import hooks
from hotloop._torch.graphs import is_own_file
from hotloop._torch.module import is_scripted
from hotloop.step.guard import bytecode
from hotloop.step.guard.bytecode import Names, names_of
from hotloop.step.guard.fingerprint import (
    SCALARS,
    parts_of,
)
from hotloop.step.guard.read_set import ReadSet, closure_of, content_of_cell, slots_view
from hotloop.step.guard.users import is_users_class, is_users_object, slots_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import CodeType

    from hotloop.step.guard.read_set import Holder

_CHAIN, _LIBRARYS_CHAIN, _MOST_ITEMS = 12, 3, 1000
"""Attributes of attributes that one piece of code is taken to read, of the program's own and of a library; items of a
container of a library's, at most, whose attributes count where a method of theirs runs."""
NEVER_FOLLOWED: frozenset[type] = frozenset({*SCALARS, types.CodeType, types.FrameType, object})
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, property, functools.cached_property)
_HOLD_ITEMS = (list, tuple, dict, set, frozenset, collections.deque, collections.abc.MappingView)
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
"""Modules whose parts are read as the items of a container are, without a name."""
_WALKS = frozenset(
    f"{named}{what}" for named in ("", "named_") for what in ("parameters", "buffers", "modules", "children")
)
"""Methods of modules that go through all of their parts."""
_NEVER_NEW = (torch.nn.Module, LRScheduler)
"""Hardly a step makes these: one that a library hands over was there before it."""
_GLOBALS = (*SCALARS, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""What the program's own code may find changed in a library's module: settings, functions in place of others."""
_OF_THE_LOOP = "hotloop.step."
NO_NAMES, _MET = Names(frozenset()), Names(frozenset())
"""No code reads by them; the second stands for a module that was met at all."""


class Follower:
    """Notes in a read set what code reads.

    Args:
        reads: the read set.
        home: the folder of the installed package that the step itself is of: its code is followed like a program's own.
        ignore: objects of ours.

    Attributes:
        labels: objects that were there before the step, and what leads to them: kept while it runs.
        steps: the code of the step itself, of which names say nothing.
        made: identities of objects that the step has made. All others are those that a library keeps somewhere.
        is_static: functions that are met count as if they ran: they may do so in compiled code, where nobody hears it.
    """

    def __init__(self, reads: ReadSet, home: str, ignore: Iterable[Any]) -> None:
        self.reads, self._home = reads, home
        self.labels: dict[int, tuple[Any, str]] = {id(one): (one, "") for one in ignore}
        self.steps: set[CodeType] = set()
        self.is_static = False
        self.made: set[int] = set()
        self._ignored = frozenset(self.labels)
        self._done: set[tuple[int, Names]] = set()
        self._functions: dict[CodeType, dict[int, tuple[types.FunctionType, str]]] = {}
        # By identity of the code, which is kept: Python works out the hash of a code each time.
        self._ran: dict[tuple[int, int], tuple[CodeType, dict[str, Any]]] = {}
        self._inner: set[CodeType] = set()
        self._closures: dict[int, tuple[CodeType, dict[str, set[int]]]] = {}
        self._classes: set[tuple[type, Names]] = set()

    def is_own(self, file: str) -> bool:
        """Return whether code in a file is the program's own, also where the program itself is installed."""
        return is_own_file(file) or (bool(self._home) and file.startswith(self._home))

    def _once(self, value: Any, names: Names) -> bool:
        return self._once_at(id(value), names)

    def _once_at(self, place: int, names: Names) -> bool:
        before = len(self._done)
        self._done.add((place, names))
        return len(self._done) > before

    # -- code --------------------------------------------------------------------------------------------------------

    def runs(self, code: CodeType, space: dict[str, Any], names: Names) -> None:
        """Note the globals and the closure variables that code reads; its arguments are noted elsewhere."""
        if (id(code), id(space)) in self._ran:
            return
        self._ran[id(code), id(space)] = code, space
        self._inner |= bytecode.inner_codes(code)
        inside = self._inside(code)
        for function, _ in list(self._functions.get(code, {}).values()):
            self._function_runs(function, names, inside)
        holder = self.reads.holder(space, space, "")
        for name in names.outside:
            self._variable(holder, name, f"global {name}", names.by(name), inside)
        modules = self.reads.holder(sys.modules, sys.modules, "")
        for name in bytecode.imported_modules(names, space):
            self._variable(modules, name, f"module {name}", names, inside)
        if names.environment:
            environment = self.reads.holder(os.environ, os.environ, "environment")
            environment.read |= {text: f"environment variable {text}" for text in names.texts}
            self.reads.note(environment, names.texts)

    def _inside(self, code: CodeType) -> str:
        if code in self.steps:
            return ""
        hook = next((label for _, label in self._functions.get(code, {}).values() if "hook of" in label), None)
        return f" (in {hook or code.co_qualname})"

    def _variable(self, holder: Holder, key: str, label: str, names: Names, inside: str) -> None:
        """Note a name that code reads, also where it leads to nothing yet, and follow its value."""
        holder.read.setdefault(key, f"{label}{inside}")
        self.reads.note(holder, [key])
        if isinstance(value := holder.fields.get(key), types.ModuleType):
            self.module_reads(value, label.rpartition(" ")[2], names, inside)
        else:
            self.follow(value, f"{label}{inside}", names)

    def module_reads(self, module: types.ModuleType, name: str, names: Names, inside: str = "") -> None:
        """Note what the program's own code may take from a module: each name that stands in the code."""
        file = vars(module).get("__file__")  # none: built in, or made by the program, or a folder of modules
        own = self.is_own(file) if file else module.__name__ not in sys.builtin_module_names
        if names.own and self._once(module, names):
            fields = vars(module)
            pythons = module.__name__.partition(".")[0] in sys.stdlib_module_names
            holder = self.reads.holder(fields, fields, "")
            for key in names.words & fields.keys():
                if own or isinstance(fields[key], _GLOBALS) or (not pythons and _holds_settings(fields[key])):
                    self._variable(holder, key, f"{name}.{key}", names.by(key), inside)

    def function(self, function: types.FunctionType, label: str) -> None:
        """Remember a function, whose closure counts if its code runs."""
        for inner in bytecode.wrapped(function):
            if not isinstance(inner, types.FunctionType):
                continue
            code, known = inner.__code__, self._functions.setdefault(inner.__code__, {})
            if id(inner) in known:
                continue
            known[id(inner)] = inner, label
            if bytecode.chooses_by_type(inner):
                self._registry(inner, label)
            if (id(code), id(inner.__globals__)) in self._ran:
                self._function_runs(inner, names_of(code), self._inside(code))
            elif self.is_static and self.is_own(code.co_filename):
                self.runs(code, inner.__globals__, names_of(code))

    def _registry(self, function: types.FunctionType, label: str) -> None:
        """Note the functions that one chooses from by the type of its argument, and follow them."""
        holder = self.reads.holder(function, function.__dict__, label)
        holder.read["registry"] = f"{label}.registry"
        self.reads.note(holder, ["registry"])
        self.follow(function.__dict__["registry"], holder.read["registry"], NO_NAMES)

    def _function_runs(self, function: types.FunctionType, names: Names, inside: str) -> None:
        holder = self.reads.holder(function, closure_of(function), function.__qualname__)
        for key in list(holder.fields):
            if key not in holder.read:
                self._variable(holder, key, key, names.by(key.rpartition(" ")[2]), inside)

    def closes_over(self, code: CodeType, values: Mapping[str, Any]) -> None:
        """Remember which objects the free variables of code hold, as a function of this code begins or ends."""
        if not code.co_freevars:
            return
        seen = self._closures.setdefault(id(code), (code, {}))[1]
        for name in code.co_freevars:
            seen.setdefault(name, set()).add(id(values.get(name)))

    def original(self, code: CodeType) -> CodeType:
        """Return the code of a function that the code of a compiler stands for."""
        place = code.co_filename, code.co_firstlineno
        return next((one for one in self._functions if (one.co_filename, one.co_firstlineno) == place), code)

    def find_functions(self) -> None:
        """Find functions that ran, close over something, and were not met: code that a text was made of, say.

        A frame does not tell its function. A module may have made many of the same code: those count that close over
        what the frames had. Where none does (somebody has set a variable since), all count.
        """
        ran_here = {id(code): code for code, _ in self._ran.values() if set(code.co_freevars) - {"__class__"}}
        known = {*self._functions, *self._inner}
        lost = {key: code for key, code in ran_here.items() if code not in known}
        referrers = gc.get_referrers(*lost.values()) if lost else ()
        made = [one for one in referrers if isinstance(one, types.FunctionType) and id(one.__code__) in lost]
        ran = list(filter(self._may_have_run, made))
        codes = {one.__code__ for one in ran}
        for function in (*ran, *(one for one in made if one.__code__ not in codes)):
            self.function(function, function.__qualname__)

    def _may_have_run(self, function: types.FunctionType) -> bool:
        _, seen = self._closures.get(id(function.__code__), (None, {}))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return all(id(content_of_cell(cell)) in seen.get(name, ()) for name, cell in cells)

    # -- values ------------------------------------------------------------------------------------------------------

    def meet(self, value: Any, names: Names) -> None:
        """Follow a value that code was handed, or made, where it is or holds an object that was there before the step.

        A helper may gather such objects in a new list, table, iterator or object of its own.
        """
        met, waiting = set[int](), [(value, names)]
        while waiting:
            value, names = waiting.pop()
            kind = type(value)
            if kind in NEVER_FOLLOWED:
                continue
            place = id(value)  # once: a library may hear of each such question
            if place in met or (kind is torch.Tensor and place not in self.labels):  # the step has made it
                continue
            met.add(place)
            if (known := self.labels.get(place)) is not None:
                self.follow(value, known[1], names)
            elif isinstance(value, _NEVER_NEW) or (isinstance(value, torch.Tensor) and _is_parameter(value)):
                self.follow(value, f"a {kind.__name__}", names)
            elif isinstance(value, types.ModuleType):
                self.module_reads(value, value.__name__, names)
            elif _holds_items(value):
                waiting += [(item, names) for item in gc.get_referents(value) if type(item) not in NEVER_FOLLOWED]
            elif names.own and place not in self.made and is_users_object(value) and kind.__weakrefoffset__:
                self.follow(value, f"a {kind.__name__}", names)  # that of one that is gone by the end does not count
            elif is_users_object(value) or isinstance(value, FunctionCtx):
                fields = {**slots_view(value, slots_of(type(value))), **getattr(value, "__dict__", {})}
                waiting += [(fields[key], names.by(key)) for key in names.words & fields.keys()]

    def follow(self, value: Any, label: str, names: Names, depth: int = 0) -> None:
        """Note which attributes of an object code reads, and follow these."""
        if type(value) in NEVER_FOLLOWED or depth > (_CHAIN if names.own else _LIBRARYS_CHAIN):
            return
        if isinstance(value, types.ModuleType):  # which asks for itself whether it was met by these names
            self.module_reads(value, label, names)
            return
        if isinstance(value, functools.partial) and (getattr(value.func, "__module__", None) or "").startswith(
            "hotloop."
        ):
            return  # what observes the step: one of its hooks
        place = id(value)
        if not self._once_at(place, names) or place in self._ignored:
            return
        label = self.labels.setdefault(place, (value, label))[1]
        if isinstance(value, torch.nn.Module):
            self._module(value, label, names, depth)
        elif isinstance(value, types.FunctionType):
            self.function(value, label)
            if value.__dict__:
                self._attributes(value, value.__dict__, label, names, depth)
        elif isinstance(value, type):
            self._class(value, names, depth)
        else:
            for item, part in parts_of(value) or ():
                self.follow(item, f"{label}{part}", names.item(), depth + 1)
            self._object(value, label, names, depth)

    def _object(self, value: Any, label: str, names: Names, depth: int) -> None:
        if id(value) in self.reads.optimizers:
            self.optimizer(value, label, names)
        elif isinstance(value, torch.optim.Optimizer):
            self._settings(value, label, names)
        if isinstance(value, types.MethodType | functools.partial) or not (names.own or _is_followed(value)):
            return
        if is_users_class(kind := type(value)):
            self._class(kind, names, depth)
            if slots := [name for name in slots_of(kind) if name in names.words or names.computed]:
                known = self.reads.slots.setdefault(id(value), [])
                known += [name for name in slots if name not in known]
                self._attributes(value, slots_view(value, known), label, names, depth)
        if isinstance(fields := getattr(value, "__dict__", None), dict):
            self._attributes(value, fields, label, names, depth)

    def _attributes(self, value: Any, fields: Mapping[str, Any], label: str, names: Names, depth: int) -> None:
        holder = self.reads.holder(value, fields, label)
        wanted = fields.keys() if names.computed else names.words & fields.keys()
        if names.own:
            holder.read |= {word: f"{label}.{word}" for word in names.words - holder.read.keys()}
            holder.every |= names.computed
        else:
            holder.kept |= names.words | wanted
        for key in list(wanted):
            item, counts = fields[key], holder.counts(key)
            if counts:
                self.reads.note(holder, [key])
            if counts or (not names.own and _is_followed(item)):
                self.follow(item, f"{label}.{key}", names.by(key), depth + 1)

    def hooks(self, tables: Iterable[dict[Any, Any]], owner: str) -> None:
        """Remember hooks, and what they are called; those of the loop itself hold its tensors, and say nothing."""
        for table in tables:
            for function in table.values():
                if not (getattr(function, "__module__", None) or "").startswith(_OF_THE_LOOP):
                    self.follow(function, f"a hook of {owner}", NO_NAMES)

    def optimizer(self, optimizer: torch.optim.Optimizer, label: str, names: Names = NO_NAMES) -> None:
        """Note the hooks of a given optimizer, a step that a scheduler sets, and what code reads of its settings."""
        tables = hooks.optimizer_hooks(optimizer)
        self.hooks(tables, label)
        self.reads.hooks |= {id(table): (table, label) for table in tables}
        holder = self.reads.holder(optimizer, vars(optimizer), label)
        holder.read["step"] = f"{label}.step"
        self.reads.note(holder, ["step"])
        self._settings(optimizer, label, names)

    def _settings(self, optimizer: torch.optim.Optimizer, label: str, names: Names) -> None:
        """Note what code reads of an optimizer's settings, whether the loop was given it or not."""
        for index, group in enumerate(optimizer.param_groups if names.own and "param_groups" in names.words else ()):
            holder = self.reads.holder(optimizer, group, f"{label}.param_groups[{index}]")
            holder.read |= {key: f"{holder.label}[{key!r}]" for key in names.words}
            holder.optimizer = label

    def _module(self, module: torch.nn.Module, label: str, names: Names, depth: int) -> None:
        if is_scripted(module):
            raise TypeError(f"{label} was scripted or traced by torch.jit: give the Python module that it was made of")
        if "_modules" not in vars(module):  # it is being made
            return
        # Code of torch's gets at the parts of parts for these: nobody hears of it by their names.
        walked = names.words & _WALKS and id(module) not in self.reads.given
        for path, part in module.named_modules() if walked else (("", module),):
            if self._once(part, _MET):
                self._met(part, f"{label}.{path}" if path else label)
        items = isinstance(module, _CONTAINERS)
        for table in hooks.module_tables(module):
            for key in list(table) if items else names.words & table.keys():
                self.follow(table[key], f"{label}.{key}", names.item() if items else names.by(key), depth + 1)
        self._object(module, label, names, depth)

    def _met(self, module: torch.nn.Module, label: str) -> None:
        """Note what every module is read for: its forward, parameters, buffers, parts and hooks."""
        holder = self.reads.holder(module, vars(module), label)
        holder.read["forward"] = f"{label}.forward"
        self.reads.note(holder, ["forward"])
        if id(module) not in self.reads.given:  # else the mode is part of the key of a call
            self.reads.others[id(module)] = weakref.ref(module)
            holder.read["training"] = f"{label}.training"
            self.reads.note(holder, ["training"])
            self.hooks(hooks.module_hooks(module), label)
        self.reads.hooks |= {id(table): (table, label) for table in hooks.module_hooks(module)}
        for table in hooks.module_tables(module):
            held = self.reads.holder(module, table, label)
            held.every = True
            self.reads.note(held, table)
        for cls in type(module).__mro__:
            self.reads.holder(cls, vars(cls), cls.__name__).read["forward"] = f"{cls.__name__}.forward"
            if "forward" in vars(cls):
                break

    def _class(self, cls: type, names: Names, depth: int) -> None:
        """Note what code reads of a class: plain values, and methods, which may be replaced."""
        if (cls, names) in self._classes:
            return
        self._classes.add((cls, names))
        meta: type = type(cls)
        for base in filter(is_users_class, (*cls.__mro__, *meta.__mro__)):
            fields = vars(base)
            holder = self.reads.holder(base, fields, base.__name__)
            if not self._once(holder, names):
                continue
            if names.own:  # a class may hide what a base has, later
                holder.read |= {word: f"{base.__name__}.{word}" for word in names.words - fields.keys()}
            for key in fields.keys() & names.words:
                member = bytecode.function_of(fields[key])
                is_function = isinstance(member, types.FunctionType)
                if is_function or (names.own and not key.startswith("__") and not isinstance(member, _DESCRIPTORS)):
                    holder.read[key] = f"{base.__name__}.{key}"
                    self.reads.note(holder, [key])
                    self.follow(member, f"{base.__qualname__}.{key}", names.by(key), depth + 1)


def _is_followed(value: Any) -> bool:
    """Return whether the attributes count that a library's code reads of an object."""
    if isinstance(value, torch.optim.Optimizer):
        return is_users_class(type(value))
    if isinstance(value, dict | list | tuple | collections.deque):  # for what they hold
        return len(value) <= _MOST_ITEMS
    return isinstance(value, (*_NEVER_NEW, torch.distributions.Distribution)) or is_users_object(value)


def _holds_settings(value: Any) -> bool:
    """Return whether a global of a library's module counts where the program's own code reads it there."""
    return isinstance(value, dict | list) or is_users_object(value)


def _is_parameter(value: torch.Tensor) -> bool:
    return isinstance(value, torch.nn.Parameter)


def _holds_items(value: Any) -> bool:
    """Return whether a value is a container, or an iterator made in C. What a generator yields is heard."""
    if isinstance(value, _HOLD_ITEMS):
        return True
    iterates = type(value).__module__ in ("builtins", "itertools") and isinstance(value, collections.abc.Iterator)
    return iterates and not isinstance(value, types.GeneratorType)
