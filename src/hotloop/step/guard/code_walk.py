"""Follows code that a step can reach: what functions close over, name and default to, and what classes hold."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.graphs import is_own_file, is_standard_library, is_user_file
from hotloop.step.guard import bytecode, fingerprint
from hotloop.step.guard.fingerprint import Same
from hotloop.step.guard.name_index import CONSTRUCTORS, LOOKS_AT_ALL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.step.guard.name_index import Mentions
    from hotloop.step.guard.walk import Walk

DEPTH = 24
"""Objects and modules in one another that are followed."""


class CodeWalk:
    """Looks through functions and classes. Each function is read once, after what led to it.

    Args:
        walk: takes note of the values that code reads, and follows them.
        mentions: the names that stand in the code, which is where they come from.
        home: the folder of the installed package that the step itself is of: its code is followed like a program's own.

    Attributes:
        globals: variables outside of functions, and which of them count.
        cells: what closures hold.
        functions: functions whose code may be replaced.
    """

    def __init__(self, walk: Walk, mentions: Mentions, home: str) -> None:
        self.globals: list[tuple[Mapping[str, Any], list[str]]] = []
        self.cells: list[types.CellType] = []
        self.functions: list[types.FunctionType] = []
        self._walk, self._mentions, self._home = walk, mentions, home
        self._classes: set[type] = set()
        self._made: set[type] = set()
        self._own_classes: dict[type, bool] = {}
        self._inherited: set[type] = set()
        self._queue: collections.deque[tuple[types.FunctionType, str]] = collections.deque()

    def is_own(self, file: str) -> bool:
        """Tell whether code in a file is followed: the program's own, also where the program itself is installed."""
        return is_own_file(file) or (bool(self._home) and file.startswith(self._home))

    def is_own_object(self, value: Any) -> bool:
        """Tell whether the code of an object's class is followed, so that it is known which attributes it reads."""
        return any(map(self.has_own_code, type(value).__mro__))

    def kept_by_libraries(self, value: Any, fields: Mapping[str, Any]) -> frozenset[str]:
        """Name the attributes that the code of a library's class, which is not followed, may read and change."""
        if self.is_own_object(value):
            return frozenset()
        return frozenset(fingerprint.plain_ones(fields, type(value)) - _of_frameworks(type(value)))

    def has_own_code(self, cls: type) -> bool:
        """Tell whether the code that a class itself adds to its bases is followed."""
        if cls not in self._own_classes:
            members = map(bytecode.function_of, list(vars(cls).values()))
            files = (bytecode.file_of(one) for one in members if isinstance(one, types.FunctionType))
            self._own_classes[cls] = any(map(self.is_own, files))
        return self._own_classes[cls]

    def function(self, function: Any, name: str, depth: int) -> None:
        """Follow a function into what it closes over, the globals it names, its defaults and its object."""
        if isinstance(function, types.MethodType):
            self._walk.value(function.__self__, _dotted(name, "self"), depth + 1)
            function = function.__func__
        chain = bytecode.wrapped(function)
        for one in reversed(chain):
            if not isinstance(one, types.FunctionType):
                unnamed = (
                    "" if isinstance(one, functools.partial | types.MethodType) else "self"
                )  # an object is the step
                self._walk.value(one, name or unnamed, depth)
            elif (one is chain[-1] or is_user_file(one.__code__.co_filename)) and self._walk.once(one):
                self._queue.append((one, f" (in {name})" if name else ""))

    def generator(self, value: types.GeneratorType[Any, Any, Any], name: str) -> None:
        """Follow a generator that has not ended into the globals that its code names; its variables are looked at."""
        frame, code = value.gi_frame, value.gi_code
        if frame is not None and self.is_own(code.co_filename):
            free = {key: frame.f_locals.get(key) for key in code.co_freevars}
            cells = tuple(map(types.CellType, free.values()))
            self.function(types.FunctionType(code, frame.f_globals, value.__name__, None, cells), name, 1)

    def finish(self) -> None:
        """Look at the code of all functions reached."""
        while self._queue:  # one after the other: calls may be nested deeper than Python allows
            self._reads(*self._queue.popleft())

    def _reads(self, function: types.FunctionType, inside: str) -> None:
        code, outside, depth = function.__code__, function.__globals__, 1
        self._mentions.add(bytecode.attributes(code), bytecode.pieces(code))
        if bytecode.asks_by_variable(code):
            self._mentions.by_variable(bytecode.listed(code))
        self.functions.append(function)
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.cells.append(cell)
            held = bytecode.content(cell)
            if isinstance(held, types.ModuleType):
                self._module_reads(held, code, f"closure variable {variable}", inside, depth)
            else:
                self._walk.value(held, f"closure variable {variable}{inside}", depth)
        for module in bytecode.imports(function):
            self._module_reads(module, code, module.__name__, inside, depth)
        self._environment(code)
        if not is_standard_library(code.co_filename):  # Python's own are caches and tables
            self._variables(code, outside, inside, depth)
        if function.__kwdefaults__:
            self._walk.tables.append(function.__kwdefaults__)
        defaults = (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        for key, default in defaults:
            self._walk.value(default, f"default {key}{inside}", depth)
        self._walk.fields(vars(function), function.__qualname__, depth)

    def _variables(self, code: types.CodeType, outside: dict[str, Any], inside: str, depth: int) -> None:
        """Note the global variables that code names."""
        texts = bytecode.attributes(code) if "globals" in bytecode.names(code) else ()  # globals()["weight"]
        evaluated = bytecode.evaluated(code)
        self._mentions.add(evaluated, ())
        variables = [name for name in sorted({*bytecode.names(code), *texts, *evaluated}) if name in outside]
        self.globals.append((outside, variables))
        for variable in variables:
            found = outside[variable]
            if isinstance(found, types.ModuleType):
                self._module_reads(found, code, variable, inside, depth)
            else:
                self._walk.value(found, f"global {variable}{inside}", depth)

    def _environment(self, code: types.CodeType) -> None:
        """Note the environment variables whose names stand in code that may read them."""
        texts = bytecode.attributes(code)
        if not {"environ", "getenv"}.isdisjoint(texts):
            for name in texts:
                if name in os.environ:
                    self._walk.note(f"environment variable {name}", os.environ[name])
            self._walk.computed.append(lambda: [os.environ.get(name) for name in texts])

    def _module_reads(self, module: types.ModuleType, code: types.CodeType, name: str, inside: str, depth: int) -> None:
        """Note what code may take from a module of the user's: each of its own names that stands in the code."""
        if depth > DEPTH or not self.is_own(getattr(module, "__file__", None) or "<built in>"):
            return
        known = [name for name in bytecode.attributes(code) if name in vars(module)]
        self.globals.append((vars(module), known))
        for attribute in known:
            found = vars(module)[attribute]
            if isinstance(found, types.ModuleType):
                self._module_reads(found, code, f"{name}.{attribute}", inside, depth + 1)
            else:
                self._walk.value(found, f"{name}.{attribute}{inside}", depth)

    def class_of(self, cls: type, depth: int) -> None:
        """Follow the methods of a user's class, each of which may be called, and its attributes."""
        users = any(map(self.has_own_code, cls.__mro__))
        users = users or (_is_made_of_frameworks(cls) and not issubclass(cls, torch.nn.Module))
        for base in cls.__mro__:
            if users and base not in self._inherited and not self.has_own_code(base):
                self._inherited.add(base)
                self._inherit(base)
            if base in self._classes:
                continue
            self._classes.add(base)
            if fingerprint.is_users_class(type(base)):  # its properties are the class's
                self.class_of(type(base), depth + 1)
            if not fingerprint.is_users_class(base):
                self._properties(base)
                continue
            self._walk.holders.append((vars(base), self._mentions.may_read))
            for key, member in list(vars(base).items()):
                function = bytecode.function_of(member)
                if isinstance(function, types.FunctionType):
                    self._mentions.follow(
                        key, functools.partial(self._method, function, f"{base.__name__}.{key}", depth)
                    )
                elif not key.startswith("__") and not isinstance(member, types.MemberDescriptorType):
                    self._mentions.follow(
                        key, functools.partial(self._walk.value, member, f"{base.__name__}.{key}", depth + 1)
                    )

    def constructors_of(self, cls: type, depth: int) -> None:
        """Follow what runs when an object is made of a user's class: code that names the class may make one."""
        if cls in self._made:
            return
        self._made.add(cls)
        for base in filter(fingerprint.is_users_class, cls.__mro__):
            for key in CONSTRUCTORS:
                function = bytecode.function_of(vars(base).get(key))
                if isinstance(function, types.FunctionType):
                    self._method(function, f"{base.__name__}.{key}", depth)
        for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
            if field.default_factory is not dataclasses.MISSING:
                self._walk.value(field.default_factory, f"{cls.__name__}.{field.name}'s default_factory", depth + 1)

    def _method(self, function: types.FunctionType, name: str, depth: int) -> None:
        self._walk.note(name, Same(function))
        if self.is_own(bytecode.file_of(function)):
            self.function(function, function.__qualname__, depth)

    def _inherit(self, cls: type) -> None:
        """Take what methods of a library's class name for named, as far as code that was reached may call them.

        Of an object of such a class all is looked at that it may keep; of one whose class is the user's, what is named.
        """
        if cls is torch.nn.Module or fingerprint.is_frameworks(cls):  # what they keep is looked at as what it is
            return
        for key, member in list(vars(cls).items()):
            function = bytecode.function_of(member)
            inner = bytecode.wrapped(function)[-1] if isinstance(function, types.FunctionType) else None
            if isinstance(inner, types.FunctionType):
                # A library that looks at all attributes does so for itself: that is no reason to count all of a user's.
                names = set(bytecode.attributes(inner.__code__)) - LOOKS_AT_ALL
                self._mentions.follow(key, functools.partial(self._mentions.add, names))

    def _properties(self, cls: type) -> None:
        """Follow a library's properties to what they are made of: who reads ``hparams`` reads ``_hparams``."""
        for key, member in list(vars(cls).items()):
            getter = bytecode.function_of(member) if isinstance(member, property | functools.cached_property) else None
            if isinstance(getter, types.FunctionType):
                self._mentions.follow(key, functools.partial(self._mentions.add, bytecode.attributes(getter.__code__)))


def _dotted(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute


def _is_made_of_frameworks(cls: type) -> bool:
    """Tell whether a class is somebody's, made of a trainer's: it is known of the trainer alone what a step changes."""
    return not fingerprint.is_frameworks(cls) and any(map(fingerprint.is_frameworks, cls.__mro__))


def _of_frameworks(cls: type) -> frozenset[str]:
    """Name what an object keeps for the trainer that its class is made of, and nothing else of the class names."""
    if not _is_made_of_frameworks(cls):
        return frozenset()
    trainers, others = set[str](), set[str]()
    for base in cls.__mro__:
        functions = filter(None, map(bytecode.function_of, list(vars(base).values())))
        inner = [bytecode.wrapped(one)[-1] for one in functions if isinstance(one, types.FunctionType)]
        names = (bytecode.attributes(one.__code__) for one in inner if isinstance(one, types.FunctionType))
        (trainers if fingerprint.is_frameworks(base) else others).update(*names)
    return frozenset(trainers - others)
