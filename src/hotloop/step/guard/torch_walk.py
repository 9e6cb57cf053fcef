"""Looks through what torch's own objects hold: modules, tensors, hooks, optimizers and their parameter groups."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import hooks
from hotloop._torch.dynamo import is_mark
from hotloop._torch.module import class_forward, get_entry, is_scripted
from hotloop.compiling.control import MethodEntry
from hotloop.step.guard import bytecode, fingerprint
from hotloop.step.guard.fingerprint import SCALARS, Same

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hotloop.step.guard.name_index import Mentions
    from hotloop.step.guard.walk import Walk
    from hotloop.step.state.holdings import Holdings

_TORCHS = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has, which are looked at as what they are: parameters, hooks, the mode."""
_OURS = "_hotloop"
"""What hotloop itself notes on a module begins so, and comes and goes with a tier."""
_WRAPPED = frozenset({"step", "zero_grad"})
"""Attributes of optimizers that schedulers and others wrap."""
_OPTIMIZERS = _WRAPPED | {"param_groups", "state"}
"""These, and what is looked at as what it is."""


class TorchWalk:
    """Looks through modules, tensors, hooks and optimizers that a step can reach.

    Args:
        walk: takes note of the values that they hold, and follows them.
        mentions: the names that stand in code that was reached.
        holdings: what was given to the loop: modes of its modules and its tensors' memory are looked after elsewhere.
        accumulators: the hooks that no tensor tells of.

    Attributes:
        tensors: those that nobody else watches; ``buffers``: those of modules that the loop was not given.
        strangers: trained tensors that nobody gave to the loop, by name: a step may leave gradients in them.
    """

    def __init__(self, walk: Walk, mentions: Mentions, holdings: Holdings, accumulators: hooks.Accumulators) -> None:
        self._accumulators = accumulators
        self.tensors: list[torch.Tensor] = []
        self.buffers: list[torch.Tensor] = []
        self.strangers: dict[str, Any] = {}
        self._walk, self._mentions = walk, mentions
        self._modules = holdings.modules
        self._given = {
            id(child): path for name, one in self._modules.items() for path, child in one.named_modules(prefix=name)
        }
        held = (holdings.parameters(), holdings.buffers(), holdings.other_tensors())
        self._held = {id(one) for tensors in held for one in tensors.values()}
        self._optimizers = {id(part) for one in holdings.optimizers.values() for part in (one.param_groups, one.state)}
        """Groups and state of the optimizers that were given, which one around them may have as well."""
        self._forwards: set[type] = set()
        self._held_parts: list[torch.nn.Module] | None = list(holdings.taken.values())
        """Parts of the given modules that code holds by another way, until those were looked at."""

    def finish(self) -> None:
        """Look at the modules that the loop was given."""
        for name, module in self._modules.items():
            self.module(module, name)
        held, self._held_parts = self._held_parts or [], None
        for part in held:
            self.is_given(part)

    def is_given(self, value: Any) -> bool:
        """Tell whether a value is one of the modules that the loop was given, which are looked at last."""
        if id(value) not in self._given:
            return False
        if self._held_parts is not None:
            self._held_parts.append(value)
        else:
            self.module(value, self._given[id(value)])
        return True

    def module(self, module: torch.nn.Module, name: str) -> None:
        """Note the plain attributes of a module and its children, their tensors, and what their hooks reach."""
        for path, child in self._parts(module, name):
            if not self._walk.once(child):
                continue
            if is_scripted(child):
                raise TypeError(
                    f"{path} was scripted or traced by torch.jit: give the Python module that it was made of"
                )
            self._walk.note(path, type(child).__qualname__)
            self._walk.typed.append(child)
            self._walk.code.class_of(type(child), 1)
            if type(child) not in self._forwards:
                self._forwards.add(type(child))
                self._walk.computed.append(functools.partial(fingerprint.forward_of, type(child)))
                self._walk.note(f"{type(child).__qualname__}.forward", Same(class_forward(type(child))))
            parameters, buffers, children = hooks.module_tables(child)
            self._walk.tables += parameters, buffers, children
            self.buffers += [one for one in buffers.values() if one is not None and id(one) not in self._held]
            for key, tensor in (*parameters.items(), *buffers.items()):
                self.tensor(tensor, f"{path}.{key}")
            self.hooks(hooks.module_hooks(child), path)
            self._own_attributes(child, path)

    def _parts(self, module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
        """Give a module and its parts; where all code is followed that may name a part, it waits for its name.

        A metric of the validation is a part of the model, and changes from epoch to epoch, while no code of the step
        names it. Its parameters and buffers are among the holdings.
        """
        yield name, module
        named = id(module) in self._given and self._names_its_parts(type(module))
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            if named:
                self._mentions.follow_child(key, functools.partial(self.module, child, path))
            else:
                yield from self._parts(child, path)

    def _names_its_parts(self, cls: type) -> bool:
        """Tell whether all code of a class is followed that may use its parts in a step; a trainer's names none."""
        others = {torch.nn.Module, *filter(_is_pythons, cls.__mro__)}
        bases = [base for base in cls.__mro__ if base not in others and not fingerprint.is_frameworks(base)]
        return bool(bases) and all(map(self._walk.code.has_own_code, bases))

    def _own_attributes(self, module: torch.nn.Module, path: str) -> None:
        attributes, cls, strange = vars(module), type(module), id(module) not in self._given
        users = self._walk.code.is_own(bytecode.file_of(class_forward(cls)))
        kept = set() if users else _kept(module)
        if strange:  # else the mode is part of the key of a call
            self._walk.note(f"{path}.training", module.training)

        def counts(key: str) -> bool:
            if key in _TORCHS or _of_a_tier(module, key):
                return key == "training" and strange
            # Code of libraries is not followed: it may read anything that is public, and what it keeps for itself.
            return self._mentions.may_read(key) if named(key) else True

        def named(key: str) -> bool:
            return users or (key.startswith("_") and key not in kept)

        self._walk.holders.append((attributes, counts))
        for key, value in list(attributes.items()):
            if key in _TORCHS or _of_a_tier(module, key):
                continue
            if named(key):
                self._mentions.follow(key, functools.partial(self._walk.value, value, f"{path}.{key}", 2))
            elif isinstance(value, SCALARS):
                self._walk.note(f"{path}.{key}", fingerprint.plain(value))
            elif counts(key):
                self._walk.value(value, f"{path}.{key}", 2, every=True)

    def tensor(self, tensor: Any, name: str) -> None:
        """Note a tensor: another one under the name is not the one that was captured."""
        if not isinstance(tensor, torch.Tensor):
            self._walk.note(name, tensor)
            return
        facts = None
        if id(tensor) not in self._held:  # else its memory and flags are looked at elsewhere
            facts = fingerprint.facts_of(tensor)
            self.tensors.append(tensor)
            if tensor.requires_grad and tensor.is_leaf:
                self.strangers[name] = tensor
        self._walk.note(name, Same(tensor, facts, keep=facts is None))  # the loop keeps what it was given anyway
        if not (kept := vars(tensor)):
            self._walk.tables.append(kept)  # until something is kept there
        else:  # by the program (parameter.lr_scale), or by dynamo
            self._walk.holders.append((kept, lambda key: not is_mark(key) and self._mentions.may_read(key)))
            for key, value in list(kept.items()):
                if not is_mark(key):
                    self._mentions.follow(key, functools.partial(self._walk.value, value, f"{name}.{key}", 3))
        functions = hooks.gradient_hook_functions(tensor)
        if of_node := self._accumulators.of(tensor):
            self._walk.note(f"the gradient hooks of {name}", tuple(of_node))
            functions += of_node.values()
        for function in functions:
            self._walk.value(function, f"a gradient hook of {name}", 1)

    def hooks(self, tables: Iterable[dict[Any, Any]], owner: str) -> None:
        """Note the hooks that are the user's, and follow them; ours come and go."""
        for table in tables:
            self._walk.tables.append(table)
            users = [hook for hook in table.values() if not _is_ours(hook)]
            for hook in users:
                self._walk.note(f"a hook of {owner}", Same(hook))
                self._walk.code.function(hook, f"a hook of {owner}", 1)

    def optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> None:
        """Note what the step's code reads of an optimizer, its hooks, and a step that somebody set: schedulers do."""
        attributes, own_class = vars(optimizer), self._walk.code.is_own_object(optimizer)

        def counts(key: str) -> bool:
            # What torch's optimizers keep for themselves, a step that is recorded changes: a fused one has a flag.
            return key not in _OPTIMIZERS and (own_class or not key.startswith("_"))

        self._walk.holders.append((attributes, lambda key: counts(key) and self._mentions.may_read(key)))
        for key, value in list(attributes.items()):
            if counts(key):
                self._mentions.follow(key, functools.partial(self._walk.value, value, f"{name}.{key}", 1))
        self.hooks(hooks.optimizer_hooks(optimizer), name)
        own = functools.partial(fingerprint.own_step, optimizer)
        self._walk.note(f"{name}.step", own())
        self._walk.computed.append(own)

    def wrapping(self, optimizer: torch.optim.Optimizer, name: str, depth: int) -> None:
        """Note what an optimizer keeps that nobody gave to the loop: one around another (Lookahead) counts its steps.

        One that steps itself is seen where it does.
        """
        self._walk.note(name, Same(optimizer))
        attributes, cls = vars(optimizer), type(optimizer)
        self._walk.code.class_of(cls, depth + 1)
        left_out = _WRAPPED | {key for key, value in attributes.items() if id(value) in self._optimizers}
        plain = (
            frozenset()
            if self._walk.code.is_own_object(optimizer)
            else frozenset(fingerprint.plain_ones(attributes, cls))
        )
        kept = plain - left_out
        self._walk.holders.append(
            (attributes, lambda key: key not in left_out and (key in kept or self._mentions.may_read(key)))
        )
        fields = {key: value for key, value in attributes.items() if key not in left_out}
        self._walk.follow_all(fields, name, depth, every=False, kept=kept)

    def settings(self, optimizer: torch.optim.Optimizer, name: str, left_out: Iterable[str]) -> None:
        """Note what the step's code reads of parameter groups; what is ``left_out`` is looked at elsewhere."""
        without = {"params", *left_out}

        def counts(key: str) -> bool:
            return key not in without and self._mentions.may_read("param_groups") and self._mentions.may_read(key)

        for index, group in enumerate(optimizer.param_groups):
            self._walk.holders.append((group, counts))
            for key, value in group.items():
                follow = functools.partial(self._walk.value, value, f"{name}.param_groups[{index}][{key!r}]", 1)
                if key not in without:
                    self._mentions.follow("param_groups", functools.partial(self._mentions.follow, key, follow))


def _kept(module: torch.nn.Module) -> set[str]:
    """Name what a module of a library, not one of torch's, keeps for itself beside what every module has."""
    if not fingerprint.is_users_class(type(module)):
        return set()
    own = {key: value for key, value in vars(module).items() if key not in _TORCHS and not key.startswith(_OURS)}
    return fingerprint.plain_ones(own, type(module))


def _of_a_tier(module: torch.nn.Module, key: str) -> bool:
    """Tell whether an attribute is hotloop's, or what the module's call is routed to: they come and go with a tier."""
    value = vars(module).get(key)
    return key.startswith(_OURS) or isinstance(value, MethodEntry) or (value is not None and value is get_entry(module))


def _is_pythons(cls: type) -> bool:
    """Tell whether a class is of Python's own library: ABC, Generic."""
    return cls.__module__.partition(".")[0] in sys.stdlib_module_names


def _is_ours(hook: Any) -> bool:
    inner = bytecode.wrapped(getattr(hook, "func", hook))[-1]
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "hotloop"
