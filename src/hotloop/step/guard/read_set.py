"""The read set of a step: what holds the values that its code has read, and the names by which it read them.

A replay repeats the path that was recorded, and the path depends only on what code has read that ran. So these values,
and no others, are compared before a replay. `hotloop.step.guard.recorder` fills a read set while a step runs.
"""

from __future__ import annotations

import collections.abc
import contextlib
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hotloop._torch.dynamo import is_mark
from hotloop._torch.module import get_entry
from hotloop.compiling.control import MethodEntry
from hotloop.step.guard import bytecode
from hotloop.step.guard.fingerprint import ABSENT, Fingerprints, is_plain
from hotloop.step.guard.users import is_users_object, package_of
from hotloop.step.state.holdings import EVERY_OPTIMIZERS, Holdings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from hotloop._torch.hooks import Accumulators

_SYNCS = ("require_forward_param_sync", "require_backward_grad_sync")
_EVERY_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, which are looked at as what they are: parameters, hooks, the mode."""
_OURS = "_hotloop"
"""What hotloop itself notes on a module begins so, and comes and goes with a tier."""
_OPTIMIZERS = (EVERY_OPTIMIZERS | {"zero_grad", "_is_overflow"}) - {"defaults"}
"""Attributes of optimizers that are looked at as what they are, one that others wrap, and one that replays set as well:
Accelerate's."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MOST_ITEMS = 200
"""Objects in a list of a library's, at most, that are compared."""


class View(collections.abc.Mapping[str, Any]):
    """Values that are in no dictionary, by name: what a function closes over, or the slots of an object."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self.now = read

    def __getitem__(self, key: str) -> Any:
        return self.now()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.now())

    def __len__(self) -> int:
        return len(self.now())


def closure_of(function: types.FunctionType) -> View:
    """Return what a function holds: the variables of its closure, its defaults, its code."""
    variables = [f"closure variable {name}" for name in function.__code__.co_freevars]
    cells = function.__closure__ or ()

    def read() -> dict[str, Any]:
        held = dict(zip(variables, map(content_of_cell, cells), strict=True))
        defaults = {"a default": function.__defaults__, "a keyword's default": function.__kwdefaults__}
        return {**held, **defaults, f"the code of {function.__name__}": function.__code__}

    return View(read)


def slots_view(value: Any, names: Iterable[str]) -> View:
    """Return the slots of an object that have a value."""
    return View(lambda: {name: item for name in names if (item := getattr(value, name, ABSENT)) is not ABSENT})


def content_of_cell(cell: types.CellType) -> Any:
    """Return what a closure holds."""
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not set yet
        return None


class Holder:
    """Values by name: the attributes of an object, the entries of a class, the globals of a module, a closure.

    Args:
        owner: the object, class or function that the values are of.
        fields: the values.
        label: how the program reads the owner; empty where the names say it all.

    Attributes:
        read: names that the program's own code reads, and what they are called.
        kept: names that only a library's code reads, of which plain values count.
        every: all names count: code reads attributes by names that it makes.
        first: the fingerprints of values when they were first read.
        optimizer: the name of the optimizer whose parameter group this is.
    """

    def __init__(self, owner: Any, fields: Mapping[str, Any], label: str) -> None:
        self._owner: Callable[[], Any] = lambda: owner
        if not isinstance(owner, torch.Tensor | dict):  # torch swaps no tensor that has weak references
            with contextlib.suppress(TypeError):  # an object that has none is kept
                self._owner = weakref.ref(owner)
        self.fields, self.label, self.kind = fields, label, type(owner)
        self.read: dict[str, str] = {}
        self.kept: set[str] = set()
        self.every = False
        self.first: dict[str, Any] = {}
        self.optimizer = ""

    @property
    def owner(self) -> Any:
        """The object; None once it is gone."""
        return self._owner()

    def joined(self, other: Holder | None) -> Holder:
        """Return a holder of the same values with the names of both."""
        made = Holder(self.owner, self.fields, self.label)
        made.read, made.kept, made.every, made.optimizer = dict(self.read), set(self.kept), self.every, self.optimizer
        if other is not None:
            made.read.update(other.read)
            made.kept |= other.kept
            made.every |= other.every
        return made

    def name_of(self, key: str) -> str:
        """Return what a value is called."""
        return self.read.get(key) or f"{self.label}.{key}"

    def names(self) -> list[str]:
        """Return the names of the values that are there and count."""
        if self.every or len(self.fields) < len(self.read) + len(self.kept):
            known = self.read.keys() | self.kept
            wanted = [key for key in self.fields if self.every or key in known]
            return [key for key in wanted if self.counts(key)]
        return [key for key in (*self.read, *sorted(self.kept)) if key in self.fields and self.counts(key)]

    def counts(self, key: str) -> bool:
        """Return whether the value of a name is compared."""
        if issubclass(self.kind, torch.nn.Module) and not self._counts_of_module(key):
            return False
        # What torch's classes keep for themselves, their own code changes: a fused optimizer has a flag.
        torchs = key.startswith("_") and package_of(self.kind) == "torch"
        torchs = torchs and not issubclass(self.kind, torch.optim.lr_scheduler.LRScheduler)
        if issubclass(self.kind, torch.optim.Optimizer) and not self.optimizer and (torchs or key in _OPTIMIZERS):
            return False
        if issubclass(self.kind, torch.Tensor) and is_mark(key):
            return False
        if key in self.read or (self.every and not key.startswith("__")):
            return True
        if key not in self.kept or torchs:
            return False
        value = self.fields.get(key, ABSENT)
        items = value if isinstance(value, list | tuple) and len(value) <= _MOST_ITEMS else (value,)
        users = bytecode.is_own_callable(value) or (not key.startswith("_") and all(map(is_users_object, items)))
        # A module of a library's is told which function to call: an activation, a distance.
        told = issubclass(self.kind, torch.nn.Module) and not key.startswith("_") and isinstance(value, _FUNCTIONS)
        return is_plain(value, self.kind) or users or told

    def _counts_of_module(self, key: str) -> bool:
        if self.fields is not getattr(self.owner, "__dict__", None):  # one of its tables
            return True
        if key in _EVERY_MODULES:
            return key in self.read and key == "training"
        if key in _SYNCS and issubclass(self.kind, DistributedDataParallel):
            return False  # a part of a call's key; what a forward sets, replays set as well
        value = self.fields.get(key)
        routed = isinstance(value, MethodEntry) or (value is not None and value is get_entry(self.owner))
        return not routed and not key.startswith(_OURS)


class ReadSet:
    """What a step's code has read, and how to read it again.

    Args:
        holdings: what was given to the loop: modes of its modules and its tensors' memory are compared elsewhere.
        accumulators: the hooks of gradients that no tensor tells of.

    Attributes:
        holders: what holds the values that were read, by the identity of their dictionary.
        hooks: tables of hooks, and whose they are.
        others: modules that ran and that the loop was not given.
        failed: what was raised as an object of the user's was looked at.
    """

    def __init__(self, holdings: Holdings, accumulators: Accumulators) -> None:
        self.holders: dict[int, Holder] = {}
        self.hooks: dict[int, tuple[dict[Any, Any], str]] = {}
        self.others: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.slots: dict[int, list[str]] = {}
        """Names of the slots of an object that code has read."""
        self.failed: Exception | None = None
        self.holdings, self.accumulators = holdings, accumulators
        self.optimizers = frozenset(map(id, holdings.optimizers.values()))
        self.given = {id(part) for module in holdings.modules.values() for part in module.modules()}
        tensors = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        self.held = frozenset(id(one) for named in tensors for one in named.values())

    def holder(self, owner: Any, fields: Mapping[str, Any], label: str) -> Holder:
        """Return the holder of an object's values."""
        # Of a class, and of what a function closes over, there is a new view each time.
        key = id(owner if isinstance(fields, types.MappingProxyType | View) else fields)
        if key not in self.holders:
            self.holders[key] = Holder(owner, fields, label)
        return self.holders[key]

    def note(self, holder: Holder, keys: Iterable[str]) -> None:
        """Take the fingerprints of values that are read for the first time."""
        for key in keys:
            if key not in holder.first and key in holder.fields:
                value = holder.fields[key]
                made = value if isinstance(value, types.FunctionType) else type(value)
                ours = package_of(made) == "hotloop"  # in the place of a value while a step is audited
                holder.first[key] = ABSENT if ours else Fingerprints(self.held).of(value)

    def joined(self, other: ReadSet) -> ReadSet:
        """Return what this run or a later one has read, without the objects that are freed."""
        made = ReadSet(other.holdings, other.accumulators)
        living = {key: one for key, one in self.holders.items() if one.owner is not None}
        for key in {**living, **other.holders}:
            ours, theirs = living.get(key), other.holders.get(key)
            made.holders[key] = ours.joined(theirs) if ours is not None else theirs.joined(None)  # type: ignore[union-attr]
        made.hooks, made.others = {**self.hooks, **other.hooks}, {**self.others, **other.others}
        return made
