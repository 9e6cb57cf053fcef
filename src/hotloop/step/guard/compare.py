"""Compares the Python state that a step has read with what it was: a capture freezes it, a replay changes nothing."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import gradient_hook_functions
from hotloop.step.guard import bytecode, fingerprint
from hotloop.step.guard.fingerprint import ABSENT, SCALARS, Fingerprints, differs_at, unwatchable_in
from hotloop.step.guard.read_set import View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from hotloop.step.guard.read_set import Holder, ReadSet


FREED: Any = object()
"""Stands for what an object held that Python has freed."""
_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Entries of a parameter group that the step does not read."""


def objects_in(leaves: Iterable[Any]) -> list[Any]:
    """Return the arguments that have attributes of their own, which a key tells by identity only."""
    return [one for one in leaves if not isinstance(one, (torch.Tensor, *SCALARS))]


def differences(before: Mapping[str, Any], after: Mapping[str, Any], *, freed: bool = True) -> list[str]:
    """Name what differs, down to the item of a container, in the order of the later look.

    Args:
        before: what one look found.
        after: what a later look found.
        freed: name what an object held that Python has freed since.
    """
    if before is after:
        return []
    found = []
    for name in (*after, *(name for name in before if name not in after)):
        one, other = before.get(name, ABSENT), after.get(name, ABSENT)
        if one != other and (freed or other is not FREED):
            found.append(f"{name}{differs_at(one, other)}")
    return found


def unwatchable(found: Mapping[str, Any]) -> list[str]:
    """Name what no look before a replay can follow."""
    return [f"{name} ({why})" for name, value in found.items() for why in unwatchable_in(value)]


class Watch:
    """Compares before each replay, in microseconds, what the step reads in Python with what was captured.

    The values of the last look are held in flat lists, which are compared by identity. If an object was replaced, all
    values are compared anew, since an equal object is no change. That look then becomes the last one.

    Args:
        reads: what the step's code has read.
        recorded: names of the optimizers whose learning rate a recording reads on the device. What code reads of any
            other in Python is frozen. None where nothing is recorded: then parameter groups are not looked at.

    Attributes:
        found: what the last look found, by a name that its author recognises; values compare with ``==``.
        strangers: parameters, by name, that the step reaches and that the loop was not given; ``buffers``: tensors of
            modules that it was not given. A step may leave gradients in the ones and move the others.
    """

    def __init__(self, reads: ReadSet, recorded: Collection[str] | None = None) -> None:
        self.reads, self._recorded = reads, recorded
        self._names: dict[int, dict[str, str]] = {}
        """What the values of each holder are called. Those of a freed object keep their names to themselves."""
        self._look()

    def changed(self) -> str:
        """Name something that differs from what was captured; empty where nothing does."""
        before = self.found
        return next(iter(differences(before, self.now())), "")

    def now(self) -> Mapping[str, Any]:
        """Return each value that the step reads, by name."""
        with contextlib.suppress(Exception):  # an attribute that is gone, an object that cannot be asked: look again
            if self._same():
                return self.found
        self._look()
        return self.found

    def as_first_read(self) -> dict[str, Any]:
        """Return what would have been found had the step changed nothing: values as they were when first read."""
        before = dict(self.found)
        for holder in self.reads.holders.values():
            if holder.owner is None:
                continue
            names, found_late = self._names.get(id(holder), {}), isinstance(holder.owner, type)
            for key in names.keys() - holder.first.keys() if holder.label and not found_late else ():  # not there
                before.pop(names[key])
            for key, value in holder.first.items():
                if value is not ABSENT:
                    before[names.get(key) or holder.name_of(key)] = value
        return before

    def _look(self) -> None:
        """Look at all values, and hold what is found."""
        self.found: dict[str, Any] = {}
        self.strangers: dict[str, Any] = {}
        self._alike = collections.Counter[str]()
        self._values = values = Fingerprints(self.reads.held)
        owned = [(one, one.owner) for one in self.reads.holders.values()]  # so that none is freed during the look
        holders = [one for one, owner in owned if owner is not None]
        freed = [self._names.get(id(one), {}) for one, owner in owned if owner is None]
        self.found |= {name: FREED for names in freed for name in names.values()}
        with self.reads.accumulators.chosen():
            read = [(holder, self._read(holder)) for holder in holders]
        for table, owner in self.reads.hooks.values():
            for hook in table.values():
                if not bytecode.is_ours(hook):
                    self._note(f"a hook of {owner}", values.of(hook))
        modules = [module for one in self.reads.others.values() if (module := one()) is not None]
        buffers = {id(one): one for module in modules for one in module.buffers(recurse=False)}
        self.buffers = [one for key, one in buffers.items() if key not in self.reads.held]
        tables = [table for table, _ in self.reads.hooks.values()]
        self._empty, self._hooks = [one for one in tables if not one], [one for one in tables if one]
        self._getters = [
            (operator.itemgetter(*keys, keys[0]), holder.fields)  # always a tuple, so never of one key alone
            for holder, keys in read
            if keys and not isinstance(holder.fields, View)
        ]
        spaces = [one for one in holders if not one.label]
        self._missing = [(one.fields.keys(), one.read.keys() - one.fields.keys()) for one in spaces]
        self._views = [holder.fields for holder in holders if isinstance(holder.fields, View)]
        objects = [one for one in holders if one.fields is getattr(one.owner, "__dict__", None)]
        self._typed = [one._owner for one in objects]  # noqa: SLF001 - it is called by map
        sized = (one.fields for one in holders if one.label and not isinstance(one.fields, View))
        self._sized = [*sized, *values.lists, *values.tables, *self._hooks]
        self._lengths, self._keys = list(map(len, self._sized)), [*_flat(values.tables)]
        self._sets = [(one, frozenset(one)) for one in values.sets]
        self._objects, self._computed = self._objects_now(), self._computed_now()

    def _read(self, holder: Holder) -> list[str]:
        """Note what a holder holds; gives the names that count."""
        left_out = {"params"}
        if holder.optimizer:
            if self._recorded is None:
                return []
            left_out |= {"lr"} if holder.optimizer in self._recorded else set()
        keys = [key for key in holder.names() if not holder.optimizer or key not in left_out]
        names = self._names[id(holder)] = {}
        for key in keys:
            value = holder.fields[key]
            name = names[key] = self._note(holder.name_of(key), self._values.of(value))
            for tensor in _trained_in(value):
                self._trained(tensor, name)
        return keys

    def _note(self, name: str, value: Any) -> str:
        """Add what was found; of two with one name (lambdas have no other) each counts."""
        free = name
        while free in self.found:
            self._alike[name] += 1
            free = f"{name} ({self._alike[name] + 1})"
        self.found[free] = value
        return free

    def _trained(self, tensor: torch.Tensor, name: str) -> None:
        if id(tensor) not in self.reads.held:
            self.strangers[name] = tensor
        if of_node := self.reads.accumulators.of(tensor):
            self._note(f"the gradient hooks of {name}", tuple(of_node))
        for function in (*gradient_hook_functions(tensor), *of_node.values()):
            self._note(f"a gradient hook of {name}", self._values.of(function))

    def _same(self) -> bool:
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            return False
        if not all(there.isdisjoint(missing) for there, missing in self._missing):
            return False
        if [*_flat(self._values.tables)] != self._keys:
            return False
        now, before = self._objects_now(), self._objects
        if len(now) != len(before):
            return False
        if not all(map(operator.is_, now, before)):
            if not all(map(fingerprint.alike, now, before)):
                return False
            self._objects = now  # equal scalars: the next time at a glance
        return all(one == then for one, then in self._sets) and self._computed_now() == self._computed

    def _objects_now(self) -> list[Any]:
        """Return what is compared by identity. Tensors are never compared by value: an equal one is another one."""
        return [
            *_flat([get(fields) for get, fields in self._getters]),
            *_flat([view.now().values() for view in self._views]),
            *_flat([one.values() for one in (*self._values.tables, *self._hooks)]),
            *_flat(self._values.lists),
            *map(type, map(operator.call, self._typed)),
        ]

    def _computed_now(self) -> list[Any]:
        """Return what is compared by value: positions, contents, facts."""
        asked = [one() for one in self._values.computed]
        return [*asked, self.reads.accumulators.now(), *map(fingerprint.facts_of, self._values.tensors.values())]


_flat = itertools.chain.from_iterable


def _trained_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors that a value is, or holds, and that gradients are added up in."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif isinstance(value, list | tuple | dict) and depth < 4 and len(value) < 1000:  # noqa: PLR2004 - seldom more
        for item in value.values() if isinstance(value, dict) else value:
            yield from _trained_in(item, depth + 1)


def frozen_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what a recording freezes of each parameter group: all but the learning rate, which is a tensor there."""
    left_out = {"params", "lr", *_OF_SCHEDULERS}
    return [
        {
            **{key: _comparable(value) for key, value in group.items() if key not in left_out},
            "params": tuple(id(one) for one in group["params"]),
            "lr": id(group["lr"]) if isinstance(group.get("lr"), torch.Tensor) else None,
        }
        for group in optimizer.param_groups
    ]


def learning_rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the learning rate of each parameter group, to compare; None where a group has none (a sign optimizer)."""
    found = (group.get("lr") for group in optimizer.param_groups)
    return [rate.tolist() if isinstance(rate, torch.Tensor) else _comparable(rate) for rate in found]


def _comparable(value: Any) -> Any:
    """Return a comparable copy of a setting, since a list may be changed in place; tensors compare by identity."""
    if isinstance(value, torch.Tensor):
        return id(value)
    if fingerprint.is_array(value):
        content = fingerprint.content_of(value)  # a large one is too much to read before each replay
        return id(value) if isinstance(content, fingerprint.Unwatchable) else content
    if isinstance(value, dict):
        return {key: _comparable(one) for key, one in value.items()}
    return type(value)(map(_comparable, value)) if type(value) in (list, tuple, set) else value
