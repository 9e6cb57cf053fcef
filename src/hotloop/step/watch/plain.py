"""Plain Python values near the step's own code, as cheap triggers: one that changes asks for a look at the operations.

A value that changes decides nothing, so the watch may be naive. It looks at the names that the program's own functions
use: in their globals, closures, and the attributes of objects that they meet; and at the modules they meet, whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import operator
import os
import random
import sys
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hotloop._torch.graphs import is_own_file
from hotloop._torch.hooks import global_hooks, module_tables, optimizer_hooks
from hotloop._torch.module import is_scripted
from hotloop.compiling.control.methods import MethodEntry
from hotloop.step.state.holdings import Views, view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DEEP, _LONG, _ARRAY = 4, 200, 1 << 16
"""How deep containers are followed, how long they may be, and how many bytes of an array are compared."""
_TIMES, _WITHIN = 3, 256
"""A value that changes so often within so many looks, and never matters, is watched no more."""
_LIBRARIES = ("torch", "builtins", "hotloop", "numpy", "logging", "threading", "lightning")
_OURS = ("hotloop.step.loop", "hotloop.testing")
"""Whose objects stand around a step, and are none of its own."""
_ABSENT: Any = object()
_TABLES = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
"""Where a module has its parts, tensors and hooks."""
_TORCHS = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects of torch's that are looked at as those of other libraries are."""
_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__code__")
_OF_PYTHON = "give the Python module that it was made of"
_flat = itertools.chain.from_iterable


class Refused:
    """Stands for a value that no recording can follow.

    Args:
        why: in words of its user's, as what the step reads.
        repeatable: whether a step that reads it may run twice, as in a proof.
    """

    def __init__(self, why: str, *, repeatable: bool = False) -> None:
        self.why, self.repeatable = why, repeatable


def mark(value: Any, depth: int = 0) -> Any:
    """Describe a value so that an equal one has an equal description: plain values by content, others by identity."""
    kind = type(value)
    if isinstance(value, SCALARS):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return kind, id(value), value.requires_grad, view_of(value)
    if depth < _DEEP and (parts := _parts(value)) is not None:
        return kind, *(mark(part, depth + 1) for part in parts)
    return kind, _content(value)


def _changes(first: Any, now: Any) -> bool:
    """Return whether marks differ in more than the memory of tensors, which is undone with a step."""
    return bool(first != now) and bool(_without_memory(first) != _without_memory(now))


def _without_memory(marked: Any) -> Any:
    if not isinstance(marked, tuple):
        return marked
    is_tensor = bool(marked) and isinstance(marked[0], type) and issubclass(marked[0], torch.Tensor)
    return marked[:3] if is_tensor else tuple(map(_without_memory, marked))


def _is_librarys(owner: Any) -> bool:
    """Return whether an object is a module of a library, whose functions we replace while a step is looked at."""
    return isinstance(owner, types.ModuleType) and owner.__name__.partition(".")[0] in _LIBRARIES


def _content(value: Any) -> Any:
    """Return what a small array holds, how full a queue or a long container is; of anything else its identity."""
    with contextlib.suppress(Exception):  # an object of the program's that cannot be asked
        if hasattr(type(value), "qsize"):
            return id(value), value.qsize()
        if _is_container(value):
            return id(value), len(value), *map(id, _ends(value))
        small = type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.nbytes < _ARRAY
        if small and not value.dtype.hasobject:
            return value.dtype.str, value.shape, value.tobytes()
    return id(value)


def _parts(value: Any) -> Iterable[Any] | None:
    """Return what a small container holds; None for anything else."""
    if type(value).__name__ == "partial":
        return value.func, value.args, value.keywords
    if isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        name = getattr(value, "__func__", value.__name__)
        return (name,) if _is_process_wide(value.__self__) else (name, value.__self__)
    with contextlib.suppress(Exception):  # as above
        if not _is_container(value) or len(value) >= _LONG:
            return None
        if isinstance(value, dict):
            return [*_flat(item for item in value.items() if not _is_hotloops(item[1]))]
        return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else [*value]
    return None


def _is_container(value: Any) -> bool:
    return isinstance(value, (dict, list, tuple, set, frozenset)) or type(value).__name__ == "deque"


def _ends(value: Any) -> tuple[Any, ...]:
    """Return the first and the last entry of a container that has an order."""
    if not value or isinstance(value, (set, frozenset)):
        return ()
    if isinstance(value, dict):
        last = next(reversed(value))
        return last, value[last]
    return value[0], value[-1]


def _moves_on(value: Any) -> bool:
    """Return whether reading a value takes it further: an iterator, a file that is read, a connection."""
    if isinstance(value, io.IOBase):  # one that is written, as a log, loses nothing
        return not value.closed and value.readable() and not value.writable()
    return hasattr(type(value), "__next__") or type(value).__module__ in ("multiprocessing.connection", "socket")


def _is_process_wide(value: Any) -> bool:
    """Return whether a value is Python's or numpy's own generator: their streams are watched and put back apart."""
    numpys = sys.modules.get("numpy.random")
    pythons: Any = random.random
    return value is pythons.__self__ or (numpys is not None and value is numpys.random.__self__)


def _is_hotloops(value: Any) -> bool:
    """Return whether a value is a hook that hotloop puts on all modules or optimizers: not the program's."""
    return isinstance(value, types.FunctionType) and str(value.__module__).startswith("hotloop.")


@dataclasses.dataclass
class _Holder:
    """An object whose values are watched: a namespace, an instance, a class, a function's cells.

    Args:
        label: what its user may know it as.
        owner: returns it; None once it is gone.
        read: returns its value of a name, `_ABSENT` where it has none.
        first: by name, the mark of the value when it was first seen.
    """

    label: str
    owner: Callable[[], Any]
    read: Callable[[Any, str], Any]
    first: dict[str, Any] = dataclasses.field(default_factory=dict)

    def value(self, name: str) -> Any:
        """Return the value of a name now."""
        owner = self.owner()
        return _ABSENT if owner is None else self.read(owner, name)


_Entry = tuple[tuple[int, str], str]


def _item(table: Any, name: str) -> Any:
    return table.get(name, _ABSENT)


def _attribute(owner: Any, name: str) -> Any:
    if not name:
        return _size(vars(owner))
    value = vars(owner).get(name, _ABSENT)
    return _ABSENT if isinstance(value, MethodEntry) else value


def _size(table: Any) -> int:
    """Count attributes, without those that a tier puts on a model and takes off."""
    return len(table) - ("_compiled_call_impl" in table)


def _slot(owner: Any, name: str) -> Any:
    return getattr(owner, name, _ABSENT)


def _itself(owner: Any, _name: str) -> Any:
    return owner


def _cell(function: Any, name: str) -> Any:
    if name in _OF_FUNCTIONS:
        return getattr(function, name)
    with contextlib.suppress(ValueError):  # it holds nothing yet, or the function has other code
        return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents
    return _ABSENT


def _held(function: types.FunctionType) -> list[int]:
    return [id(_cell(function, name)) for name in function.__code__.co_freevars]


class _Kept:
    """Holds an object that allows no weak references."""

    def __init__(self, one: Any) -> None:
        self.one = one

    def __call__(self) -> Any:
        return self.one

    @property
    def alone(self) -> bool:
        """Whether nobody else has the object."""
        return sys.getrefcount(self.one) <= 2  # noqa: PLR2004 - this one, and the argument


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return _Kept(value)


class PlainWatch:
    """Watches plain values that a step may read.

    Args:
        step: the step, as its author wrote it.
        models: the modules that the loop was given.
        optimizers: its optimizers, whose hooks and groups are watched. What else they keep is undone with the step,
            and one that keeps something of its own runs outside of recordings.
        ignore: objects that are none of the step's: the loop, a framework around it.

    Attributes:
        refused: what the step meets that no recording can follow, with the reason, what to do about it, and whether
            a proof may run it twice.
        modules: the modules that it meets.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        ignore: Iterable[Any] = (),
    ) -> None:
        self.refused: list[tuple[str, str, bool]] = []
        self.modules: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._holders: dict[tuple[int, str], _Holder] = {}
        self._ignored = {id(one) for one in ignore}
        self._optimizers = {id(one) for one in optimizers}
        self._codes: dict[int, tuple[types.CodeType, tuple[str, ...]]] = {}
        """Code that ran, by identity: the names that the program's own uses, nothing for that of others."""
        self._followed: set[tuple[int, tuple[str, ...]]] = set()
        self._cells: dict[tuple[int, ...], list[Any]] = {}
        """By code and what its free variables held as it was called: the marks of these."""
        self._generators: dict[str, tuple[Any, Any]] = {}
        """Random generators of the program's own, with their state when they were met."""
        self._last: dict[_Entry, Any] = {}
        self._asked = 0
        self._harmless: dict[_Entry, list[int]] = {}
        """By value that has changed and did not matter: when, in looks."""
        for one in models:
            self._module(one, type(one).__name__)
        for table in (*global_hooks(), *_flat(map(optimizer_hooks, optimizers))):
            self._hold(table, "hooks of optimizers or of all modules", _Kept(table), _itself, ["items"])
        self._step = getattr(step, "__func__", step)
        self.function(self._step)
        if isinstance(step, functools.partial):
            self._hold(step, "what is bound to the step", _Kept(step), _itself, ["arguments"])

    # -- what is watched -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def hearing(self, ours: Callable[..., Any]) -> Iterator[None]:
        """Follow the program's own functions that run in the block; beside a profiler, modules alone are watched.

        Args:
            ours: calls what is ours amid the user's step.
        """
        if sys.getprofile() is not None:
            yield
            return

        def hook(frame: types.FrameType, event: str, _: Any) -> None:
            if event == "call" and (names := self._names_of(frame.f_code)):
                ours(self._enter, frame.f_code, frame, names)

        sys.setprofile(hook)
        try:
            yield
        finally:
            if sys.getprofile() is hook:
                sys.setprofile(None)

    def _names_of(self, code: types.CodeType) -> tuple[str, ...]:
        known = self._codes.get(id(code))  # Python works out the hash of a code each time
        if known is None:
            texts = [one for one in code.co_consts if isinstance(one, str) and one.isidentifier()]
            own = is_own_file(code.co_filename)
            known = self._codes[id(code)] = code, (*code.co_names, *texts, code.co_name) if own else ()
        return known[1]

    def _enter(self, code: types.CodeType, frame: types.FrameType, names: tuple[str, ...]) -> None:
        space, home = frame.f_globals, str(frame.f_globals.get("__name__", ""))
        self._hold(space, home, _Kept(space), _item, code.co_names)
        if "getenv" in names:
            self._follow(os.environ, "os.environ", names)
        for name in code.co_names:
            if name in space:
                self._follow(space[name], f"{home}.{name}", names)
        found = frame.f_locals
        if code.co_freevars:
            held = tuple(found.get(name, _ABSENT) for name in code.co_freevars)
            self._cells.setdefault((id(code), *map(id, held)), [*map(mark, held)])
        for name, value in found.items():
            if name in code.co_freevars or not hasattr(type(value), "__next__"):  # the step has made others itself
                self._follow(value, name, names)

    def _hold(
        self, one: Any, label: str, owner: Callable[[], Any], read: Callable[[Any, str], Any], names: Iterable[str]
    ) -> None:
        key = id(one), read.__name__
        holder = self._holders.get(key)
        if holder is None or holder.owner() is None:
            holder = self._holders[key] = _Holder(label, owner, read)
        for name in names:
            if name not in holder.first:
                holder.first[name] = mark(holder.value(name))

    def _follow(self, value: Any, label: str, names: tuple[str, ...], depth: int = 0) -> None:
        """Watch the attributes of an object that the step's code names, and so on from there."""
        ours = str(type(value).__module__).startswith(_OURS)
        known = ours or isinstance(value, (*SCALARS, torch.Tensor)) or (id(value), names) in self._followed
        if known or depth > _DEEP or id(value) in self._ignored:
            return
        self._followed.add((id(value), names))
        if _moves_on(value):
            kind = "an iterator" if hasattr(type(value), "__next__") else "a connection"
            self.refused.append((f"{kind}, which moves on: {label}", "", False))
        elif isinstance(value, Refused):
            self.refused.append((value.why, "", value.repeatable))
        elif isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
            self._generators.setdefault(label, (value, _state_of(value)))
        elif (parts := _parts(value)) is not None:
            for number, part in enumerate(parts):
                self._follow(part, f"{label}[{number}]", names, depth + 1)
        elif not isinstance(value, types.FunctionType):
            if isinstance(value, torch.nn.Module):
                self._module(value, label)
            self._object(value, label, names, depth)

    def _object(self, value: Any, label: str, names: tuple[str, ...], depth: int) -> None:
        is_class = isinstance(value, type)
        if label == "self" and id(value) in self._optimizers:  # what an optimizer's own code moves is its state
            names = (*{"param_groups"}.intersection(names),)
        classes = (value if is_class else type(value)).__mro__[:-1]
        own = [one for one in classes if str(one.__module__).partition(".")[0] not in _LIBRARIES]
        table = {} if is_class else getattr(value, "__dict__", {})
        if isinstance(value, _TORCHS) or not own:
            self._plain_parts(value, label)
        for name, part in table.items():
            if isinstance(part, _TORCHS):  # a scheduler in a library's wrapper, whose code is not looked at
                self._plain_parts(part, f"{label}.{name}")
        contains = any(hasattr(type(value), one) for one in ("__getitem__", "__getattr__"))
        if own and contains and not isinstance(value, type | torch.nn.Module) and len(table) < _LONG:
            names = (*names, *table)  # somebody's own container: no code names what it keeps its items in
        known = [name for name in dict.fromkeys(names) if name in table or any(name in vars(one) for one in own)]
        slots = set[str]()
        for one in own:
            members = [name for name in known if isinstance(vars(one).get(name), types.MemberDescriptorType)]
            slots.update(() if is_class else (name for name in members if _slot(value, name) is not _ABSENT))
            self._hold(
                one, one.__name__, _reference(one), _attribute, ["", *(name for name in known if name not in members)]
            )
        if table:
            self._hold(
                value, label, _reference(value), _attribute, ["", *(name for name in known if name not in slots)]
            )
        if slots:
            self._hold(value, label, _reference(value), _slot, slots)
        for name in known:
            at = next((vars(one)[name] for one in own if name in vars(one)), None)
            found = _slot(value, name) if name in slots else table.get(name, at)
            self._follow(found, f"{label}.{name}", names, depth + 1)

    def _module(self, root: torch.nn.Module, label: str) -> None:
        """Watch a module and its parts whole: attributes, plain ones of what these hold, tables, hooks, forward."""
        for path, one in root.named_modules():
            if id(one) in self.modules or id(one) in self._ignored:
                continue
            self.modules[id(one)] = weakref.ref(one)
            here = f"{label}.{path}" if path else label
            if is_scripted(one):
                self.refused.append((f"{here}, scripted or traced by torch.jit", _OF_PYTHON, False))
                continue
            held = {name: value for name, value in vars(one).items() if name not in (*_TABLES, "_compiled_call_impl")}
            if isinstance(one, DistributedDataParallel):  # flags of its own, which each forward sets
                held = {}
            self._hold(one, here, weakref.ref(one), _attribute, ("", *held))
            self._hold(type(one), type(one).__name__, _reference(type(one)), _attribute, ["forward"])
            for name in (name for name in _TABLES if "state_dict" not in name):  # such hooks run in no step
                self._hold(vars(one)[name], f"{here}.{name}", _Kept(vars(one)[name]), _itself, ["items"])
            for name, parameter in module_tables(one)[0].items():
                plain = [key for key in vars(parameter) if not key.startswith("_")] if parameter is not None else []
                if plain:  # dynamo's marks begin with an underscore
                    self._hold(vars(parameter), f"{here}.{name}", _Kept(vars(parameter)), _item, plain)
            for name, value in held.items():
                self._plain_parts(value, f"{here}.{name}")

    def _plain_parts(self, value: Any, label: str) -> None:
        """Watch the plain attributes of an object that a module holds: a config."""
        table = getattr(value, "__dict__", None)
        torchs = isinstance(value, _TORCHS)
        library = str(type(value).__module__).partition(".")[0] in _LIBRARIES and not torchs
        if not isinstance(table, dict) or library or isinstance(value, torch.nn.Module | type | types.ModuleType):
            return
        if id(value) not in self._ignored:
            plain = [name for name, part in table.items() if isinstance(part, (*SCALARS, list, tuple, dict))]
            self._hold(value, label, _reference(value), _attribute, plain)

    def _functions(self) -> None:
        """Watch the cells, defaults and code of the program's functions that ran."""
        codes = [code for code, names in self._codes.values() if names]
        functions: dict[int, list[Any]] = {}
        for one in gc.get_referrers(*codes) if codes else ():
            if isinstance(one, types.FunctionType):
                functions.setdefault(id(one.__code__), []).append(one)
                if not one.__closure__:
                    self.function(one)
        for (code, *held), marks in self._cells.items():
            # Other functions may have this code: the one that ran has most of what was found in its cells.
            alike = [(sum(map(operator.eq, _held(one), held)), one) for one in functions.get(code, ())]
            most = max((count for count, _ in alike), default=0)
            for function in (one for count, one in alike if count == most):
                self.function(function)
                self._holders[id(function), _cell.__name__].first.update(
                    zip(function.__code__.co_freevars, marks, strict=True)
                )

    def function(self, one: Any) -> None:
        """Watch the cells, defaults and code of a function of Python's."""
        if not isinstance(one, types.FunctionType):
            return
        names = tuple(dict.fromkeys(_flat(names for _, names in self._codes.values())))
        for name in one.__code__.co_freevars:
            if isinstance(held := _cell(one, name), dict):  # a framework's table of what the step reads
                self._follow(held, name, names)
        self._hold(one, one.__qualname__, _reference(one), _cell, (*one.__code__.co_freevars, *_OF_FUNCTIONS))

    # -- what has changed ------------------------------------------------------------------------------------------

    def settle(self) -> dict[str, tuple[Any, Any]]:
        """End the look at a step; return the marks of what it has changed, by name: before, and now. `look` follows."""
        self._functions()
        self.function(self._step)
        found = {
            self._name(entry): (first, now)
            for entry, first in self._all()
            # What is gone again the step itself, or a framework around it, has put there for the time.
            if entry[1]
            and _changes(first, now := mark(self._value(entry)))
            and self._value(entry) is not _ABSENT
            and not (callable(self._value(entry)) and _is_librarys(self._holders[entry[0]].owner()))
        }
        states = {name: (state, _state_of(one)) for name, (one, state) in self._generators.items()}
        found |= {name: ((type(one),), (type(now),)) for name, (one, now) in states.items() if one != now}
        self._generators.clear()
        self._codes.clear()
        self._cells.clear()
        self._followed.clear()
        return found

    def _all(self) -> Iterator[tuple[_Entry, Any]]:
        for key, holder in self._holders.items():
            if holder.owner() is not None:
                for name, first in holder.first.items():
                    yield (key, name), first

    def _value(self, entry: _Entry) -> Any:
        return self._holders[entry[0]].value(entry[1])

    def _name(self, entry: _Entry) -> str:
        return f"{self._holders[entry[0]].label}.{entry[1]}".removesuffix(".")

    def look(self) -> None:
        """Hold the present values: later ones are compared with them. Objects that only the step had are let go."""
        self._let_go()
        self._last = {entry: mark(self._value(entry)) for entry, _ in self._all()}
        self._collect()

    def _let_go(self) -> None:
        for key, holder in [*self._holders.items()]:
            owner = holder.owner
            if owner() is None or (isinstance(owner, _Kept) and owner.alone):
                del self._holders[key]

    def _collect(self) -> None:
        """Collect what is compared at a glance: how values are read, and the containers that they are."""
        self._getters = [(one.owner, _getter(one)) for one in self._holders.values() if one.read is not _itself]
        self._filled, self._empty, self._contents = list[Any](), list[Any](), list[Any]()
        self._views = Views(dict.fromkeys(one for entry in self._last for one in _tensors(self._value(entry))))
        for entry in self._last:
            self._add(self._value(entry), 0)
        self._now = self._values()

    def _add(self, value: Any, depth: int) -> None:
        parts = _parts(value) if depth < _DEEP and not isinstance(value, SCALARS) else None
        if parts is None:
            if not isinstance(content := _content(value), int):
                self._contents.append((value, content))
            return
        if isinstance(value, (dict, list, set)) or type(value).__name__ == "deque":
            (self._filled if value else self._empty).append(value)
        for part in parts:
            self._add(part, depth + 1)

    def _values(self) -> list[Any]:
        return [
            *_flat([get(one) for owner, get in self._getters if (one := owner()) is not None]),
            *_flat(self._filled),
            *_flat([one.values() for one in self._filled if isinstance(one, dict)]),
        ]

    def changed(self) -> list[str]:
        """Name the values that are no longer what they were; mostly none."""
        self._asked += 1
        with contextlib.suppress(Exception):  # an object that is gone, or cannot be asked any more: look closely
            now = self._values()
            same = len(now) == len(self._now) and all(map(operator.is_, now, self._now)) and not any(self._empty)
            if same and self._views.same() and all(_content(one) == content for one, content in self._contents):
                return []
        found = self._changed_entries()
        if not found:
            self._let_go()
            self._last = {entry: last for entry, last in self._last.items() if entry[0] in self._holders}
            self._collect()
        return [*map(self._name, found)]

    def moved(self) -> list[str]:
        """Name what a step has changed: not how many attributes there are, which a tier changes as well."""
        found = [entry for entry in self._changed_entries() if entry[1]]
        return [self._name(one) for one in found if _changes(self._last[one], mark(self._value(one)))]

    def _changed_entries(self) -> list[_Entry]:
        """List what has changed of objects that are still there: what replaced another is a value of its own."""
        return [
            entry
            for entry, last in self._last.items()
            if self._holders[entry[0]].owner() is not None and mark(self._value(entry)) != last
        ]

    def release(self) -> None:
        """Let go of the values that are held: what the program has dropped is gone in the coming step, as in eager."""
        self._now, self._filled, self._empty, self._contents, self._views = [], [], [], [], Views([])

    def forget_changed(self) -> None:
        """Watch no more what changes again and again, and changes nothing of what the step does."""
        for entry in self._changed_entries():
            times = self._harmless.setdefault(entry, [])
            times.append(self._asked)
            if len(times) >= _TIMES and times[-1] - times[-_TIMES] <= _WITHIN:
                del self._holders[entry[0]].first[entry[1]]
        self.look()

    # -- tensors that nobody named ---------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that the step meets, with what its user may know them as."""
        for entry in self._last:
            yield from ((self._name(entry), one) for one in _tensors(self._value(entry)))

    def strangers(self, held: set[int]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Return trained tensors by name, and buffers of modules, that are met and that the loop was not given."""
        modules = [module for one in self.modules.values() if (module := one()) is not None]
        buffers = {id(one): one for module in modules for one in module.buffers(recurse=False)}
        trained = dict[str, torch.Tensor]()
        for entry in self._last:
            for number, one in enumerate(_tensors(self._value(entry))):
                if one.requires_grad and one.is_leaf and id(one) not in held:
                    trained[f"{self._name(entry)}[{number}]"] = one
        return trained, [one for key, one in buffers.items() if key not in held]


def _tensors(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEP and (parts := _parts(value)) is not None:
        for part in parts:
            yield from _tensors(part, depth + 1)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None  # the machine's own has no state
    if isinstance(generator, random.Random):
        return generator.getstate()
    state = getattr(
        generator, "get_state", lambda: getattr(generator, "bit_generator", None) and generator.bit_generator.state
    )
    return repr(state())


def _getter(holder: _Holder) -> Callable[[Any], Any]:
    """Return what reads all watched values of a holder at once."""
    names = tuple(holder.first)
    if holder.read is _attribute:
        return lambda owner: [_size(vars(owner)), *map(vars(owner).get, names)]
    if holder.read is _item:
        return lambda owner: [*map(owner.get, names)]
    return lambda owner: [holder.read(owner, name) for name in names]
