"""The Python state that a step can reach: what it reads there is frozen by a capture, what it changes is not changed.

Reachable are the step's closure, the globals that its code names (also in modules of the user's), defaults and the
object that a method belongs to; from there functions and methods of the user's, containers, objects' attributes, and
the attributes and hooks of modules.
"""

from __future__ import annotations

import collections
import collections.abc
import dis
import functools
import itertools
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from hotloop._torch.graphs import is_user_file

_DEPTH = 6
_ENTRIES = 5_000
"""Values looked at, at most: a data set that the step can reach is not walked through."""
_ITEMS = 200
"""Items of a container that are looked at one by one; of a longer one, its length and its ends."""
_SCALARS = (int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device, torch.Size)
_NOT_IN_STEPS = ("__init__", "__new__", "__post_init__", "__del__", "__repr__", "__str__", "__reduce__", "__getstate__")
"""Methods that Python calls by itself, but not of an object that a step uses."""
_LOOKS_AT_ALL = frozenset({"vars", "__dict__"})
"""Code that names one of these may read any attribute."""
_INSIDES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_LIBRARIES = ("torch", "numpy", "builtins", "hotloop", "logging", "threading", "lightning", "tqdm", "rich")


def reachable(
    step: Callable[..., Any], modules: Mapping[str, torch.nn.Module], ignore: Iterable[Any] = ()
) -> dict[str, Any]:
    """Give each value that the step can reach, by a name that its author recognises; values compare with ``==``.

    Args:
        step: the user's function.
        modules: the models, whose attributes are reachable however the step gets at them.
        ignore: objects that a capture takes care of: optimizers, GradScalers.
    """
    walk = _Walk(ignore)
    walk.function(step, "", 0)
    for name, module in modules.items():
        walk.module(module, name)
    return walk.found


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name what differs, the names in the order of the later look."""
    names = [*after, *(name for name in before if name not in after)]
    return [name for name in names if before.get(name, _ABSENT) != after.get(name, _ABSENT)]


_ABSENT = object()


class Watch:
    """Tells before each replay, in microseconds, whether what the step reads in Python is still what was captured.

    Attributes of modules are compared one level deep; what changes inside their containers was for the proof to find.
    """

    def __init__(self, step: Callable[..., Any], modules: Mapping[str, torch.nn.Module], ignore: Iterable[Any]) -> None:
        self._step = step
        children = {
            id(child): (path, child) for name, one in modules.items() for path, child in one.named_modules(prefix=name)
        }
        self._ignore = [*ignore, *(child for _, child in children.values())]
        self._classes = list(dict.fromkeys(type(child) for _, child in children.values()))
        self._values = self._reachable()
        self._holders = [
            (path, holder, list(holder.values()))
            for path, child in children.values()
            for holder in (vars(child), *(vars(child)[name] for name in _INSIDES))
            if holder is not vars(child) or not _is_users_module(child)
        ]
        self._users = [
            (path, vars(child), keys, [vars(child)[key] for key in keys])
            for path, child in children.values()
            if _is_users_module(child)
            for keys in ([key for key in vars(child) if self._counts(key)],)
        ]
        self._hooks = [vars(child)[name] for _, child in children.values() for name in _HOOKS]
        self._numbers = self._numbers_of_hooks()

    def changed(self) -> str:
        """Name something that differs from what was captured; empty where nothing does."""
        try:
            for path, holder, before in self._holders:  # lists compare by identity first, so this is quick
                if list(holder.values()) != before:
                    return _changed_attribute(path, holder, before)
            for path, holder, keys, before in self._users:
                if [holder.get(key) for key in keys] != before:
                    return _changed_attribute(path, {key: holder.get(key) for key in keys}, before)
        except (RuntimeError, ValueError, TypeError):  # an array or tensor in place of another: not one truth value
            return _changed_attribute(path, holder, before)
        if self._numbers_of_hooks() != self._numbers:
            return "a hook of a module"
        values = self._reachable()
        return "" if values == self._values else differences(self._values, values)[0]

    def _numbers_of_hooks(self) -> list[int]:
        return list(itertools.chain.from_iterable(self._hooks))  # torch gives each hook a number of its own

    def _counts(self, key: str) -> bool:
        """Tell whether an attribute of a user's module is the step's business: torch's own, or named in its code."""
        return key == "training" or key.startswith("_") or self._walk.mentions(key)

    def _reachable(self) -> dict[str, Any]:
        self._walk = walk = _Walk(self._ignore)
        walk.function(self._step, "", 0)
        for one in self._classes:
            walk.methods(one, 1)
        return walk.found


def gradient_hooks(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Give the numbers of the hooks that run as a parameter's gradient is made: a recording holds what they did."""
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001
    return (tuple(hooks) if hooks else None, tuple(after) if after else None)


def _changed_attribute(path: str, holder: dict[str, Any], before: list[Any]) -> str:
    """Name the attribute of a module (or its parameter, buffer or child) that is another object now."""
    if len(before) != len(holder):
        return f"an attribute of {path}"
    return next(
        (f"{path}.{key}" for (key, now), then in zip(holder.items(), before, strict=True) if now is not then), path
    )


@functools.lru_cache(maxsize=1024)
def _is_users_class(cls: type) -> bool:
    return _is_own(_file(getattr(cls, "forward", None)))


def _is_users_module(module: torch.nn.Module) -> bool:
    """Tell whether the code of a module is followed: only then is it known which of its attributes it reads."""
    cls: type = type(module)
    return _is_users_class(cls)


class _Tensor:
    """Stands for one tensor, and is equal to nothing else.

    It does not keep the tensor; a bare ``id`` would not either, but may be another tensor's once this one is gone.
    """

    __slots__ = ("_ref",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = weakref.ref(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor) and (own := self._ref()) is not None and own is other._ref()

    __hash__ = None  # type: ignore[assignment]


class _Walk:
    """Looks through what code can reach. Attributes and methods count once their name stands in code that is reached.

    So a counter that the program keeps on its trainer, and that no code of the step mentions, is not the step's.
    """

    def __init__(self, ignore: Iterable[Any]) -> None:
        self.found: dict[str, Any] = {}
        self._seen: set[int] = {id(one) for one in ignore}
        self._names: set[str] = {"forward"}  # which torch calls
        self._waiting: dict[str, list[Callable[[], None]]] = collections.defaultdict(list)

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

    def function(self, function: Any, name: str, depth: int) -> None:
        """Follow a function into what it closes over, the globals it names, its defaults and its object."""
        if isinstance(function, types.MethodType):
            self.value(function.__self__, _dotted(name, "self"), depth + 1)
            function = function.__func__
        chain = _wrapped(function)
        for one in reversed(chain):
            if not isinstance(one, types.FunctionType):
                self.value(one, name, depth)
            elif id(one) not in self._seen and (one is chain[-1] or is_user_file(one.__code__.co_filename)):
                self._seen.add(id(one))
                self._reads(one, f" (in {name})" if name else "", depth + 1)

    def _reads(self, function: types.FunctionType, inside: str, depth: int) -> None:
        code, outside = function.__code__, function.__globals__
        self._mention(_attributes(code))
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.value(_content(cell), f"closure variable {variable}{inside}", depth)
        for variable in _names(code):
            found = outside.get(variable, _ABSENT)
            if isinstance(found, types.ModuleType):
                self._module_reads(found, code, f"{variable}{{}}{inside}", depth)
            elif found is not _ABSENT:
                self.value(found, f"global {variable}{inside}", depth)
        defaults = (*enumerate(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())
        for key, default in defaults:
            self.value(default, f"default {key}{inside}", depth)

    def _module_reads(self, module: types.ModuleType, code: types.CodeType, name: str, depth: int) -> None:
        """Note what code may take from a module of the user's: each of its own names that stands in the code."""
        if not _is_own(getattr(module, "__file__", None) or "<built in>"):
            return
        for attribute in _attributes(code):
            if attribute in vars(module):
                self.value(vars(module)[attribute], name.format(f".{attribute}"), depth)

    def methods(self, cls: type, depth: int) -> None:
        """Follow the methods of a user's class: each may be called, and read globals and closures."""
        for method in _methods(cls):
            follow = functools.partial(self.function, method, method.__qualname__, depth)
            self._attribute(_wrapped(method)[-1].__name__, follow)

    def module(self, module: torch.nn.Module, name: str) -> None:
        """Note the plain attributes of a module and its children, and what their hooks reach."""
        for path, child in module.named_modules(prefix=name):
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            self.methods(type(child), 1)
            for key, value in vars(child).items():
                if key in _HOOKS:
                    for hook in value.values():
                        self.function(hook, f"a hook of {path}", 1)
                elif key in ("_parameters", "_buffers"):  # another tensor under the name is not the one captured
                    self.found |= {f"{path}.{n}": _Tensor(one) if one is not None else one for n, one in value.items()}
                elif key != "training" and not key.startswith("_"):
                    follow = functools.partial(self.value, value, f"{path}.{key}", 2)
                    if _is_users_module(child):
                        self._attribute(key, follow)
                    else:  # code of libraries is not followed, and may read anything of its own
                        follow()

    def value(self, value: Any, name: str, depth: int) -> None:
        """Note one value, and follow what it holds."""
        if len(self.found) >= _ENTRIES:
            return
        if isinstance(value, _SCALARS):
            self.found[name] = _plain(value)
        elif isinstance(value, torch.Tensor):
            self.found[name] = _Tensor(value)
        elif id(value) in self._seen or depth > _DEPTH:
            return
        elif isinstance(value, types.FunctionType | types.MethodType):
            if _is_users(value):
                self.function(value, name, depth)
        elif isinstance(value, torch.nn.Module):
            self.module(value, name)
        elif isinstance(value, functools.partial):
            self.value(value.func, name, depth + 1)
            self.value((value.args, value.keywords), f"an argument of {name}", depth + 1)
        else:
            self._seen.add(id(value))
            self._object(value, name, depth)

    def _object(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, Mapping):
            self.found[name] = ("length", len(value))
            for key, item in _ends(value.items(), len(value)):
                self.value(item, f"{name}[{key!r}]", depth + 1)
        elif isinstance(value, list | tuple | collections.deque):
            self.found[name] = ("length", len(value))
            for index, item in _ends(enumerate(value), len(value)):
                self.value(item, f"{name}[{index}]", depth + 1)
        elif isinstance(value, set | frozenset):
            self.found[name] = ("length", len(value))
        elif (position := _position(value)) is not None:
            self.found[name] = position
        elif isinstance(value, types.GeneratorType):
            self._generator(value, name, depth + 1)
        elif _is_users_object(value):
            self.methods(type(value), depth + 1)
            for key, item in vars(value).items():
                self._attribute(key, functools.partial(self.value, item, f"{name}.{key}", depth + 1))

    def _generator(self, value: types.GeneratorType[Any, Any, Any], name: str, depth: int) -> None:
        """A generator is where its code and its variables are: a loop stops at the same place each time."""
        frame = value.gi_frame
        self.found[name] = ("generator", frame.f_lasti if frame is not None else -1)
        for key, item in dict(frame.f_locals).items() if frame is not None else ():
            self.value(item, f"{name}: {key}", depth)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not set yet
        return None


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Give the globals that code reads, that of functions defined inside it too; attributes are no globals."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(names.union(*(_names(one) for one in inner))))


@functools.lru_cache(maxsize=1024)
def _attributes(code: types.CodeType) -> tuple[str, ...]:
    """Give the names of attributes that code reads, also by ``getattr``, that of functions defined inside it too."""
    texts = {constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier()}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return tuple(sorted(texts.union(code.co_names, *(_attributes(one) for one in inner))))


@functools.lru_cache(maxsize=512)
def _methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Give the methods of a class of the user's and of the user's classes that it builds on."""
    found = (one for base in cls.__mro__ for one in vars(base).values())
    plain = (one.__func__ if isinstance(one, classmethod | staticmethod) else one for one in found)
    return tuple(one for one in plain if isinstance(one, types.FunctionType) and _is_own(_file(one)))


def _wrapped(function: Any) -> list[Any]:
    """Give a function and those that it wraps, as decorators leave them, the outermost first."""
    chain = [function]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None and len(chain) < _DEPTH:
        chain.append(inner)
    return chain


def _file(function: Any) -> str:
    code = getattr(_wrapped(function)[-1], "__code__", None)
    return code.co_filename if code is not None else "<built in>"


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    """Tell whether a file is of the user's project, and not of an installed package."""
    return is_user_file(file) and "site-packages" not in file and "dist-packages" not in file


def _plain(value: Any) -> Any:
    return ("nan",) if value != value else (type(value).__name__, value)  # noqa: PLR0124 - NaN is unequal to itself


def _ends(items: Iterable[Any], length: int) -> Iterator[Any]:
    """Give all of a short container, the first and last items of a long one."""
    if length <= _ITEMS:
        yield from items
        return
    half = _ITEMS // 2
    yield from (item for index, item in enumerate(items) if index < half or index >= length - half)


def _position(value: Any) -> Any:
    """Tell where an iterator or a random generator is, so that its use in a step shows; None for other objects."""
    if isinstance(value, random.Random):
        return "random", hash(value.getstate())
    if _is_numpys(value):
        return "random", str(value.bit_generator.state if hasattr(value, "bit_generator") else value.get_state())
    if isinstance(value, itertools.count):
        return "count", repr(value)
    length = getattr(value, "__length_hint__", None)
    if callable(length) and not isinstance(value, type):
        return "left", length()
    return _position_of_others(value)


def _position_of_others(value: Any) -> Any:
    if not isinstance(value, collections.abc.Iterator) or isinstance(value, types.GeneratorType):
        return None
    if type(value).__module__ in ("builtins", "itertools"):  # cycle, zip, map: nobody can tell
        return _Unknown()
    if _is_users_object(value) or not hasattr(value, "__dict__"):  # the first is looked at like any object
        return None
    return tuple(one for one in vars(value).values() if type(one) is int)  # a data loader's counts what it has given


def _is_numpys(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


class _Unknown:
    """Equal to nothing, itself included."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


def _is_users(function: Any) -> bool:
    return is_user_file(_file(getattr(function, "__func__", function)))


def _is_users_object(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | torch.optim.Optimizer) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _dotted(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
