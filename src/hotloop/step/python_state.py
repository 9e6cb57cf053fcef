"""The Python state that a step can reach: what it reads there is frozen by a capture, what it changes is not changed.

Reachable are the step's closure, the globals that its code names, defaults and the object that a method belongs to;
from there functions of the user's, containers, objects' attributes, and the attributes and hooks of modules.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import itertools
import types
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
        self._values = reachable(step, {}, self._ignore)
        self._modules = [(path, vars(child), _insides(vars(child))) for path, child in children.values()]

    def changed(self) -> str:
        """Name something that differs from what was captured; empty where nothing does."""
        for path, attributes, before in self._modules:
            try:
                same = bool(_insides(attributes) == before)
            except (RuntimeError, ValueError, TypeError):  # an array or tensor in place of another: not one truth value
                same = False
            if not same:
                return _changed_attribute(path, attributes, before)
        values = reachable(self._step, {}, self._ignore)
        return "" if values == self._values else differences(self._values, values)[0]


def _insides(attributes: dict[str, Any]) -> list[list[Any]]:
    return [list(attributes.values()), *(list(attributes[name].values()) for name in _INSIDES)]


def _changed_attribute(path: str, attributes: dict[str, Any], before: list[list[Any]]) -> str:
    if len(before[0]) != len(attributes):
        return f"an attribute of {path}"
    for holder, values in zip((attributes, *(attributes[name] for name in _INSIDES)), before, strict=True):
        for (key, now), then in zip(holder.items(), values, strict=False):
            if now is not then and key not in _INSIDES:
                return f"{path}.{key}"
    return path


class _Walk:
    def __init__(self, ignore: Iterable[Any]) -> None:
        self.found: dict[str, Any] = {}
        self._seen: set[int] = {id(one) for one in ignore}

    def function(self, function: Any, name: str, depth: int) -> None:
        """Follow a function into what it closes over, the globals it names, its defaults and its object."""
        if isinstance(function, types.MethodType):
            self.value(function.__self__, _dotted(name, "self"), depth + 1)
            function = function.__func__
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, types.FunctionType):
            self.value(function, name, depth)
            return
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        inside = f" (in {name})" if name else ""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.value(_content(cell), f"closure variable {variable}{inside}", depth + 1)
        for variable in _names(function.__code__):
            if variable in function.__globals__:
                self.value(function.__globals__[variable], f"global {variable}{inside}", depth + 1)
        for index, default in enumerate(function.__defaults__ or ()):
            self.value(default, f"default {index}{inside}", depth + 1)

    def module(self, module: torch.nn.Module, name: str) -> None:
        """Note the plain attributes of a module and its children, and what their hooks reach."""
        for path, child in module.named_modules(prefix=name):
            if id(child) in self._seen:
                continue
            self._seen.add(id(child))
            for key, value in vars(child).items():
                if key in _HOOKS:
                    for hook in value.values():
                        self.function(hook, f"a hook of {path}", 1)
                elif key in ("_parameters", "_buffers"):  # another tensor under the name is not the one captured
                    self.found |= {f"{path}.{n}": id(tensor) for n, tensor in value.items()}
                elif key != "training" and not key.startswith("_"):
                    self.value(value, f"{path}.{key}", 2)

    def value(self, value: Any, name: str, depth: int) -> None:
        """Note one value, and follow what it holds."""
        if len(self.found) >= _ENTRIES:
            return
        if isinstance(value, _SCALARS):
            self.found[name] = _plain(value)
        elif isinstance(value, torch.Tensor):
            self.found[name] = ("tensor", id(value))
        elif id(value) in self._seen or depth > _DEPTH:
            return
        elif isinstance(value, types.FunctionType | types.MethodType):
            if _is_users(value):
                self.function(value, name, depth)
        elif isinstance(value, torch.nn.Module):
            self.module(value, name)
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
        elif _is_users_object(value):
            for key, item in vars(value).items():
                self.value(item, f"{name}.{key}", depth + 1)


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
    """Tell where an iterator or generator is, so that its use in a step shows."""
    if isinstance(value, types.GeneratorType):
        return ("generator", value.gi_frame.f_lasti if value.gi_frame is not None else -1)
    if isinstance(value, itertools.count):
        return ("count", repr(value))
    length = getattr(value, "__length_hint__", None)
    return ("left", length()) if callable(length) and not isinstance(value, type) else None


def _is_users(function: Any) -> bool:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and is_user_file(code.co_filename)


def _is_users_object(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | torch.optim.Optimizer) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in _LIBRARIES


def _dotted(name: str, attribute: str) -> str:
    return f"{name}.{attribute}" if name else attribute
