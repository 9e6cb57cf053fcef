"""What a step may change: parameters, gradients, buffers, optimizer state, and what else the user named."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hotloop.step.state.memory import in_place

_Kind = TypeVar("_Kind")
_DEPTH = 4
EVERY_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
"""Attributes that each optimizer has: its groups, state and hooks."""


class Holdings:
    """The parts of a program that its step may change.

    Args:
        models: modules by name.
        optimizers: optimizers by name.
        state: anything else: modules, GradScalers, objects whose attributes hold tensors.
    """

    def __init__(
        self,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        state: Sequence[Any] = (),
    ) -> None:
        self.models, self.optimizers, self.state = dict(models), dict(optimizers), tuple(state)
        self.found: list[torch.Tensor] = []
        """Tensors that nobody named, which a step was seen to write into."""
        self.strangers: dict[str, torch.nn.Parameter] = {}
        """Parameters of others, which a step may leave gradients in for an optimizer that steps outside; what they
        hold counts where it is found to be written, like any tensor of others."""
        self.taken: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        """Parts of the models that steps were heard to take out of them, or to call, by whatever code. One that is
        replaced is not kept."""
        self.gradients_altered = False
        """A step was seen to write gradients after an optimizer had found them."""
        self._kept: dict[str, Any] = {}
        self._still = 0

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Look for each kind of tensor once while the block runs: it runs no user's code, and rebinds nothing."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1
            if not self._still:
                self._kept.clear()

    def _once_a_block(self, kind: str, find: Callable[[], dict[str, _Kind]]) -> dict[str, _Kind]:
        if not self._still:
            return find()
        if kind not in self._kept:
            self._kept[kind] = find()
        return {**self._kept[kind]}

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The models, and the modules among the other state, by name."""
        others = {f"state[{i}]": one for i, one in enumerate(self.state) if isinstance(one, torch.nn.Module)}
        return {**self.models, **others}

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Give every parameter once, by name: of the modules, those that only an optimizer knows, and strangers."""
        return self._once_a_block("parameters", self._named_parameters)

    def _named_parameters(self) -> dict[str, torch.nn.Parameter]:
        named: dict[str, torch.nn.Parameter] = {}
        seen: set[int] = set()

        def add(name: str, parameter: torch.nn.Parameter) -> None:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                named[name] = parameter

        modules = self.modules
        for module_name, module in modules.items():
            for name, parameter in module.named_parameters():
                add(_joined(module_name, name, modules), parameter)
        for optimizer_name, optimizer in self.optimizers.items():
            for group, index, parameter in _in_groups(optimizer):
                add(f"{optimizer_name}.param_groups[{group}][{index}]", parameter)
        for name, parameter in self.strangers.items():
            add(name, parameter)
        return named

    def buffers(self) -> dict[str, torch.Tensor]:
        """Give every buffer once, by name."""
        return self._once_a_block("buffers", self._named_buffers)

    def _named_buffers(self) -> dict[str, torch.Tensor]:
        modules = self.modules
        named = {
            _joined(module_name, name, modules): buffer
            for module_name, module in modules.items()
            for name, buffer in module.named_buffers()
        }
        return once(named)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Give the tensors of the optimizers' state, named by parameter and key."""
        names = {id(parameter): name for name, parameter in self.parameters().items()}
        return {
            f"{names.get(id(parameter), 'a parameter')}: {key}": value
            for optimizer in self.optimizers.values()
            for parameter, entry in optimizer.state.items()
            if isinstance(entry, Mapping)
            for key, value in entry.items()
            if isinstance(value, torch.Tensor)
        }

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Give the tensors of the other state, and those that were found."""
        named = {}
        for index, one in enumerate(self.state):
            if not isinstance(one, torch.nn.Module):
                for path, tensor in _tensors_of(one, _DEPTH):
                    named[f"{type(one).__name__} (state[{index}]){path}"] = tensor
        for index, tensor in enumerate(self.found):
            named[f"a tensor outside the model, {tuple(tensor.shape)} (#{index})"] = tensor
        return named

    def _optimizers_own(self) -> dict[str, torch.Tensor]:
        """Give the tensors that an optimizer keeps on itself: Lookahead writes its slow weights at every k-th step."""
        return {
            f"{name}.{attribute}{path}": tensor
            for name, optimizer in self.optimizers.items()
            for attribute, value in vars(optimizer).items()
            if attribute not in EVERY_OPTIMIZERS
            for path, tensor in _tensors_of(value, _DEPTH)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give every tensor that a step may write into, but for gradients, each memory once."""
        objects = self.objects()
        return once({name: in_place(one) for name, one in objects.items() if not one.is_meta})  # that hold something

    def objects(self) -> dict[str, torch.Tensor]:
        """Give what `tensors` names as the objects that the program knows, those that share memory as well."""
        with self.still():
            return self._once_a_block("objects", self._named_objects)

    def _named_objects(self) -> dict[str, torch.Tensor]:
        return {
            **{f"parameter {name}": one for name, one in self.parameters().items() if name not in self.strangers},
            **{f"optimizer state of {name}": one for name, one in self.optimizer_state().items()},
            **{f"buffer {name}": one for name, one in self.buffers().items()},
            **self._optimizers_own(),
            **self.other_tensors(),
        }

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Give each parameter's gradient as it is now."""
        return {name: parameter.grad for name, parameter in self.parameters().items()}


def _joined(module: str, name: str, modules: Mapping[str, Any]) -> str:
    return name if len(modules) == 1 else f"{module}.{name}"


def _in_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, int, torch.nn.Parameter]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield number, index, parameter


def once(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what shares an entry's whole memory: tied weights, an EMA's live reference."""
    first: dict[int, torch.Tensor] = {}
    known: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in named.items():
        at = tensor.data_ptr() if tensor.layout == torch.strided else -id(tensor)
        if (other := first.get(at)) is None:  # mostly: then shape and strides need not be asked for
            first[at] = tensor
        else:
            known.add(_view(other))
            if tensor.numel() and _view(tensor) in known:
                continue
            known.add(_view(tensor))
        kept[name] = tensor
    return kept


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Tell a view from others of its memory."""
    if tensor.layout != torch.strided:
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors_of(value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors in an object's attributes and containers, with their paths."""
    if isinstance(value, torch.Tensor):
        yield "", value
    elif depth == 0 or isinstance(value, torch.nn.Module | torch.optim.Optimizer | type):
        return
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key!r}]{path}", tensor) for path, tensor in _tensors_of(item, depth - 1))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from ((f"[{index}]{path}", tensor) for path, tensor in _tensors_of(item, depth - 1))
    elif hasattr(value, "__dict__"):
        for name, item in vars(value).items():
            yield from ((f".{name}{path}", tensor) for path, tensor in _tensors_of(item, depth - 1))
