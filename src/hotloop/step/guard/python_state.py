"""The Python state that a step can reach: a capture freezes what the step reads of it, a replay changes none of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import hooks
from hotloop._torch.graphs import package_of
from hotloop.step.guard import bytecode, fingerprint
from hotloop.step.guard.fingerprint import ABSENT, SCALARS, Unwatchable
from hotloop.step.guard.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from hotloop.step.state.holdings import Holdings


def objects_in(leaves: Iterable[Any]) -> list[Any]:
    """Give the arguments that have attributes of their own, which a key tells by identity only."""
    return [one for one in leaves if not isinstance(one, (torch.Tensor, *SCALARS))]


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Name what differs, the names in the order of the later look."""
    if before is after:
        return []
    names = [*after, *(name for name in before if name not in after)]
    return [name for name in names if before.get(name, ABSENT) != after.get(name, ABSENT)]


def unwatchable(found: Mapping[str, Any]) -> list[str]:
    """Name what no look before a replay can follow."""
    return [f"{name} ({value.why})" for name, value in found.items() if isinstance(value, Unwatchable)]


def _look(
    walk: Walk,
    step: Callable[..., Any],
    holdings: Holdings,
    objects: Iterable[Any],
    recorded: Collection[str] | None,
) -> None:
    walk.code.function(step, "", 0)
    for index, one in enumerate(holdings.state):
        # Modules are among the modules; a schedule that is given to be saved may go on outside of the step.
        if not isinstance(one, torch.nn.Module | torch.optim.lr_scheduler.LRScheduler):
            name = f"{type(one).__name__} (state[{index}])"
            walk.value(one, name, 0, every=not walk.code.is_own_object(one))
    for one in objects:
        walk.value(one, f"argument {type(one).__name__}", 0)
    for name, optimizer in holdings.optimizers.items():
        walk.torchs.optimizer(optimizer, name)
        if recorded is not None:
            walk.torchs.settings(optimizer, name, ("lr",) if name in recorded else ())
    walk.torchs.hooks(hooks.global_hooks(), "all modules or optimizers")
    walk.finish()


class Watch:
    """Tells before each replay, in microseconds, whether what the step reads in Python is still what was captured.

    What a look around found is held in flat lists, which are compared by identity. Only where something is another
    object is all of it looked at again: it may be an equal one, or nothing that the step reads. From then on that look
    is what counts.

    Attributes:
        found: what the last look found; ``unread``: names of that which the step does not read.
        strangers: parameters, by name, that the step reaches and that the loop was not given; ``buffers``: tensors of
            modules that it was not given. A step may leave gradients in the ones and move the others: a survey sees
            what most operations write into, but not the running statistics of a BatchNorm, and no gradient where there
            was none.

    Args:
        step: the user's function.
        holdings: the models, whose attributes are reachable however the step gets at them; optimizers, for their
            hooks; and the other state.
        ignore: objects of ours.
        objects: arguments of the step that are no tensors or plain values.
        recorded: names of the optimizers whose learning rate a recording reads on the device. What code reads of any
            other in Python is frozen. None where nothing is recorded: then parameter groups are not looked at, but
            parts of models as well that the step does not read: it may change them.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        holdings: Holdings,
        ignore: Iterable[Any],
        objects: Iterable[Any],
        recorded: Collection[str] | None = None,
    ) -> None:
        self._accumulators = accumulators = hooks.Accumulators()
        ignored, home, whole = tuple(ignore), package_of(bytecode.file_of(step)), recorded is None
        self._walk: Callable[[], Walk] = lambda: Walk(
            (*ignored, *holdings.optimizers.values()), holdings, accumulators, home, whole=whole
        )
        self._look = functools.partial(_look, step=step, holdings=holdings, objects=tuple(objects), recorded=recorded)
        self._take()

    def changed(self) -> str:
        """Name something that differs from what was captured; empty where nothing does."""
        before = self.found
        return next(iter(differences(before, self.now())), "")

    def now(self) -> Mapping[str, Any]:
        """Give each value that the step can reach, by a name that its author recognises; values compare with ``==``."""
        with contextlib.suppress(Exception):  # an attribute that is gone, an object that cannot be asked: look again
            if self._same():
                return self.found
        self._take()
        return self.found

    def _take(self) -> None:
        """Look around, and hold what is found."""
        walk = self._walk()
        with self._accumulators.chosen():
            self._look(walk)
        self.found: Mapping[str, Any] = walk.found
        self.unread, self.strangers = walk.unread, walk.torchs.strangers
        self.buffers = list({id(one): one for one in walk.torchs.buffers}.values())
        tables = list({id(one): one for one in walk.tables}.values())
        self._empty, self._tables = [one for one in tables if not one], [one for one in tables if one]
        holders = [(holder, [key for key in holder if counts(key)]) for holder, counts in walk.holders]
        self._getters = [_getter(holder, keys) for holder, keys in (*holders, *walk.code.globals) if keys]
        self._cells, self._lists, self._typed = walk.code.cells, walk.lists, walk.typed
        self._functions, self._computed, self._tensors = walk.code.functions, walk.computed, walk.torchs.tensors
        self._sized = [*(holder for holder, _ in holders), *walk.lists, *self._tables]
        self._lengths = list(map(len, self._sized))
        self._keys = list(itertools.chain.from_iterable(self._tables))
        self._sets = [(one, frozenset(one)) for one in walk.sets]
        self._objects = self._objects_now()
        self._values = self._values_now()

    def _same(self) -> bool:
        if any(self._empty) or list(map(len, self._sized)) != self._lengths:
            return False
        if list(itertools.chain.from_iterable(self._tables)) != self._keys:
            return False
        now, before = self._objects_now(), self._objects
        if len(now) != len(before):
            return False
        if not all(map(operator.is_, now, before)):
            if not all(map(fingerprint.alike, now, before)):
                return False
            self._objects = now  # equal scalars: the next time at a glance
        return all(one == then for one, then in self._sets) and self._values_now() == self._values

    def _objects_now(self) -> list[Any]:
        """Give what is compared by identity. Tensors are never compared by value: an equal one is another one."""
        flat = itertools.chain.from_iterable
        return [
            *flat([one.values() for one in self._tables]),
            *flat([get(holder) for get, holder in self._getters]),
            *[cell.cell_contents for cell in self._cells],
            *flat(self._lists),
            *map(type, self._typed),
            *[one.__code__ for one in self._functions],
            *[one.__defaults__ for one in self._functions],
            *[one.__kwdefaults__ for one in self._functions],
        ]

    def _values_now(self) -> list[Any]:
        """Give what is compared by value: positions, contents, facts."""
        return [*[one() for one in self._computed], *map(fingerprint.facts_of, self._tensors)]


def _getter(holder: Mapping[str, Any], keys: list[str]) -> tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, Any]]:
    """Give what takes several entries of a dictionary in one go: always a tuple, so never of one key alone."""
    return operator.itemgetter(*keys, keys[0]), holder
