"""Fills a read set while a step runs: hears each function that begins, with its globals, closure and arguments.

Of the objects that a frame is handed, those count that were there before the step: they are found from the step's
closure and globals. Objects that the step makes for itself do not count.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import operator
import os
import types
import typing
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch import hooks
from hotloop._torch.graphs import package_of
from hotloop.step.guard import bytecode
from hotloop.step.guard.bytecode import names_of
from hotloop.step.guard.code_reads import NEVER_FOLLOWED, NO_NAMES, Follower
from hotloop.step.guard.read_set import ReadSet, View

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import CodeType, FrameType

    from hotloop.step.guard.bytecode import Names
    from hotloop.step.state.holdings import Holdings

_TORCH = os.path.dirname(torch.__file__) + os.sep  # noqa: PTH120 - compared as strings, thousands of times
_SKIPPED = (
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,  # noqa: PTH120
    *(
        f"{_TORCH}{name}"
        for name in ("optim/", "autograd/", "nn/modules/module.py", "nn/parameter.py", "_", "utils/", "fx/")
    ),
    "<frozen",
    *(str(one.__file__) for one in (contextlib, dis, enum, inspect, typing)),
)
"""Files whose code reads what is looked at as what it is."""
_SCHEDULERS = str(torch.optim.lr_scheduler.__file__)
"""Beside torch's optimizers, whose files are not followed: what a scheduler keeps is compared nowhere else."""
_FRAMEWORKS = ("/lightning/", "/pytorch_lightning/", "/lightning_fabric/", "/transformers/trainer")
"""In the files of trainers: what they keep is known to go on outside the step."""
_READ_BY_NAME = frozenset(map(id, (getattr, hasattr, setattr, vars, dir)))
_GETTERS = (operator.attrgetter, operator.methodcaller)


class Recorder:
    """Hears one run of a step.

    Args:
        step: the user's function.
        holdings: what the loop was given.
        ignore: objects of ours.
        objects: arguments of the step that are no tensors or plain values.
        accumulators: the hooks of gradients that no tensor tells of.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        holdings: Holdings,
        ignore: Iterable[Any],
        objects: Iterable[Any],
        accumulators: hooks.Accumulators,
    ) -> None:
        self.reads = ReadSet(holdings, accumulators)
        self._followed = Follower(self.reads, package_of(bytecode.file_of(step)), ignore)
        self._codes: dict[int, tuple[CodeType, Names | None]] = {}
        self._iterators: dict[tuple[int, int], Any] = {}
        """What generator expressions run over, met once each: such code goes on, and ends, with each of its items."""
        self._name_modules()
        self._name_hooks()
        self._name_step(step)
        labels = self._followed.labels
        for index, one in enumerate(holdings.state):
            labels.setdefault(id(one), (one, f"{type(one).__name__} (state[{index}])"))
        for one in objects:
            labels.setdefault(id(one), (one, f"argument {type(one).__name__}"))

    def know(self, made: set[int]) -> None:
        """Take objects for the step's own, by their ids: containers of its arguments, which the call's key holds."""
        self._followed.made |= made

    def _name_modules(self) -> None:
        labels = self._followed.labels
        for name, module in self.reads.holdings.modules.items():
            for path, part in module.named_modules(prefix=name):
                labels[id(part)] = part, path
                self._followed.hooks(hooks.module_hooks(part), path)
                for table in hooks.module_tables(part)[:2]:
                    labels |= {id(one): (one, f"{path}.{key}") for key, one in table.items() if one is not None}

    def _name_hooks(self) -> None:
        followed, reads = self._followed, self.reads
        for name, parameter in reads.holdings.parameters().items():
            label = followed.labels.setdefault(id(parameter), (parameter, name))[1]
            of_node = reads.accumulators.of(parameter)
            for function in (*hooks.gradient_hook_functions(parameter), *of_node.values()):
                followed.follow(function, f"a gradient hook of {label}", NO_NAMES)
        for name, optimizer in reads.holdings.optimizers.items():
            followed.labels[id(optimizer)] = optimizer, name
            followed.optimizer(optimizer, name)
        everywhere, owner = hooks.global_hooks(), "all modules or optimizers"
        followed.hooks(everywhere, owner)
        reads.hooks |= {id(table): (table, owner) for table in everywhere}

    def _name_step(self, step: Callable[..., Any]) -> None:
        followed = self._followed
        for function in bytecode.wrapped(step):
            if isinstance(function, types.MethodType):
                followed.labels.setdefault(id(function.__self__), (function.__self__, "self"))
            inner = getattr(function, "__func__", function)
            if isinstance(inner, types.FunctionType):
                followed.steps.add(inner.__code__)
            if isinstance(inner, functools.partial):
                bound = self.reads.holder(inner, View(functools.partial(_bound_by, inner)), "the step")
                bound.read = {"bound": "an argument of the step"}
                self.reads.note(bound, bound.read)
            unnamed = isinstance(inner, types.FunctionType | functools.partial)  # else an object is the step
            followed.follow(inner, "" if unnamed else "self", NO_NAMES)

    def began(self, code: CodeType, frame: FrameType) -> bool:
        """Follow the reads of a function that begins, or of a generator that goes on; return whether they may count."""
        names = self._names(code)
        if names is None and self.reads.failed is None and self._is_property(code, frame):
            owner = code.co_varnames[0]
            self._carefully(self._followed.meet, frame.f_locals[owner], names_of(code).by(owner))
        if names is not None and self.reads.failed is None:
            self._carefully(self._frame, code, frame, names)
        return names is not None or _is_frameworks(code)

    def hears(self, code: CodeType) -> bool:
        """Return whether what code reads may count."""
        return self._names(code) is not None or _is_frameworks(code)

    def _is_property(self, code: CodeType, frame: FrameType) -> bool:
        """Return whether code of a trainer gives the program's own code an attribute: ``hparams`` is ``_hparams``.

        It may ask another such property in turn: a module's ``current_epoch`` is its trainer's.
        """
        if not _is_frameworks(code) or not code.co_argcount or frame.f_back is None:
            return False
        owner = type(frame.f_locals.get(code.co_varnames[0]))
        if not isinstance(inspect.getattr_static(owner, code.co_name, None), property):
            return False
        caller = self._names(frame.f_back.f_code)
        return caller.own if caller is not None else self._is_property(frame.f_back.f_code, frame.f_back)

    def returned(self, code: CodeType, frame: FrameType, value: Any) -> None:
        """Note the value that a function returns: its caller reads that value."""
        if self.reads.failed is None:
            self._carefully(self._ended, code, frame, value)

    def asks(self, frame: FrameType) -> None:
        """Hear of a call of ``getattr`` or its like, whose arguments are in variables."""
        names = self._names(frame.f_code)
        if names is None or self.reads.failed is not None:
            return
        for held, attribute in names.asked:
            value, word = frame.f_locals.get(held), frame.f_locals.get(attribute)
            if isinstance(word, str):
                self._carefully(self._followed.meet, value, names.reading(word))
            else:
                self._carefully(self._followed.meet, value, names.by(held))

    def finish(self) -> ReadSet:
        """Return what was read, once the step has run."""
        if self.reads.failed is None:
            self._carefully(self._followed.find_functions)
        self._followed = Follower(self.reads, "", ())  # objects are kept no longer
        self._iterators.clear()
        return self.reads

    def assume(self) -> None:
        """Count all code of the models' classes as code that ran: compiled code may run it without a Python call."""
        self._followed.is_static = True
        for module in self.reads.holdings.modules.values():
            for part in module.modules():
                self._carefully(self._assume, part)

    def _assume(self, module: torch.nn.Module) -> None:
        for cls in type(module).__mro__:
            for member in map(bytecode.function_of, list(vars(cls).values()) if cls is not torch.nn.Module else ()):
                if isinstance(member, types.FunctionType) and (names := self._names(member.__code__)) is not None:
                    self._followed.meet(module, names)
                    if names.own:
                        self._followed.runs(member.__code__, member.__globals__, names)

    def _carefully(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
            self.reads.failed = error

    def _names(self, code: CodeType) -> Names | None:
        """Return the names in code; None for code that is not followed."""
        found = self._codes.get(id(code))  # by identity: the hash of a code is worked out each time
        if found is None:
            file = code.co_filename
            own = code in self._followed.steps or self._followed.is_own(file)
            own = own or (file.startswith("<") and not file.startswith("<frozen"))  # made of a text
            skipped = (file.startswith(_SKIPPED) and file != _SCHEDULERS) or _is_frameworks(code)
            found = self._codes[id(code)] = code, names_of(code, own=own) if own or not skipped else None
        return found[1]

    def _frame(self, code: CodeType, frame: FrameType, names: Names) -> None:
        values = self._values(code, frame)
        if code.co_name == "__init__" and not getattr(made := values.get(code.co_varnames[0]), "__dict__", None):
            self._followed.made.add(id(made))
        if not names.own:
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]:
                self._followed.meet(values.get(name), names)
            return
        if any(name.startswith("__compiled_fn") for name in code.co_names):  # it has taken up others', unheard
            self._followed.is_static, code = True, self._followed.original(code)
            names = names_of(code)
        space = frame.f_globals
        for one in (*map(values.get, code.co_freevars), *map(space.get, names.outside)):
            if id(one) in _READ_BY_NAME or isinstance(one, _GETTERS):
                names = names.computing()
                break
        self._followed.closes_over(code, values)
        self._followed.runs(code, space, names)
        self._meet(code, values, names)

    def _meet(self, code: CodeType, values: dict[str, Any], names: Names) -> None:
        for name, value in values.items():
            if name == ".0" and code.co_flags & inspect.CO_GENERATOR:
                key = id(code), id(value)
                if key in self._iterators:
                    continue
                self._iterators[key] = value
            self._followed.meet(value, names.by(name))

    def _values(self, code: CodeType, frame: FrameType) -> dict[str, Any]:
        """Return the variables of a frame, without an optimizer whose method runs: what it keeps is compared anyway."""
        values = frame.f_locals
        first = values.get(code.co_varnames[0]) if code.co_varnames else None
        if id(first) in self.reads.optimizers and hasattr(type(first), code.co_name):
            return {name: value for name, value in values.items() if value is not first}
        return values

    def _ended(self, code: CodeType, frame: FrameType, value: Any) -> None:
        names = self._names(code)
        if names is not None and names.own:
            values = self._values(code, frame)
            self._followed.closes_over(code, values)
            self._meet(code, values, names)
        if type(value) not in NEVER_FOLLOWED and frame.f_back is not None:
            caller = self._names(frame.f_back.f_code)
            if caller is not None:
                self._followed.meet(value, caller)


def _is_frameworks(code: CodeType) -> bool:
    return any(name in code.co_filename for name in _FRAMEWORKS)


def _bound_by(step: functools.partial[Any]) -> dict[str, Any]:
    return {"bound": (step.args, step.keywords)}
