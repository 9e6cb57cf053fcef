"""Everything that a step may change: parameters, gradients, buffers, optimizer state, and objects the user named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hotloop.step.state.storages import in_place, view_of

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
        """Tensors that nobody named, but that a step was seen to write into."""
        self.strangers: dict[str, torch.nn.Parameter] = {}
        """Parameters of other programs. A step may leave gradients in them for an optimizer that steps outside. Their
        values count only if they are found to be written, like those of any tensor of others."""
        self.gradients_altered = False
        """A step was seen to write gradients after an optimizer had read them."""
        self._cache: dict[str, Any] = {}
        self._still = 0

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Look up each kind of tensor only once while the block runs: it runs no user code, and rebinds nothing."""
        self._still += 1
        try:
            yield
        finally:
            self._still -= 1
            if not self._still:
                self._cache.clear()

    def _cached(self, kind: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if not self._still:
            return find()
        if kind not in self._cache:
            self._cache[kind] = find()
        return {**self._cache[kind]}

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """The models, and the modules among the other state, by name."""
        others = {f"state[{i}]": part for i, part in enumerate(self.state) if isinstance(part, torch.nn.Module)}
        return {**self.models, **others}

    def _prefixes(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules, each with the text before the names of its tensors; a single module needs none."""
        modules = self.modules
        for name, module in modules.items():
            yield "" if len(modules) == 1 else f"{name}.", module

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Return every parameter once, by name: those of modules, those only an optimizer knows, and strangers."""
        return self._cached("parameters", self._find_parameters)

    def _find_parameters(self) -> dict[str, torch.nn.Parameter]:
        named: dict[str, torch.nn.Parameter] = {}
        seen: set[int] = set()

        def add(name: str, parameter: torch.nn.Parameter) -> None:
            if (place := id(parameter)) not in seen:
                seen.add(place)
                named[name] = parameter

        for prefix, module in self._prefixes():
            for name, parameter in module.named_parameters():
                add(prefix + name, parameter)
        for optimizer_name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    add(f"{optimizer_name}.param_groups[{number}][{index}]", parameter)
        for name, parameter in self.strangers.items():
            add(name, parameter)
        return named

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return every buffer once, by name."""
        return self._cached("buffers", self._find_buffers)

    def _find_buffers(self) -> dict[str, torch.Tensor]:
        return distinct_views(
            {prefix + name: buffer for prefix, module in self._prefixes() for name, buffer in module.named_buffers()}
        )

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the optimizers' state, named by parameter and key."""
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
        """Return the tensors of the other state, and those that steps were seen to write into."""
        named = {}
        for index, part in enumerate(self.state):
            if not isinstance(part, torch.nn.Module):
                for path, tensor in _tensors_of(part):
                    named[f"{type(part).__name__} (state[{index}]){path}"] = tensor
        for index, tensor in enumerate(self.found):
            named[f"a tensor outside the model, {tuple(tensor.shape)} (#{index})"] = tensor
        return named

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that a step may write into, except gradients; each memory once.

        Tensors on the meta device hold nothing, and are left out.
        """
        objects = self.objects()
        return distinct_views({name: in_place(tensor) for name, tensor in objects.items() if not tensor.is_meta})

    def objects(self) -> dict[str, torch.Tensor]:
        """Return what `tensors` names, as the objects that the program knows; also those that share memory."""
        with self.still():
            return self._cached("objects", self._find_objects)

    def _find_objects(self) -> dict[str, torch.Tensor]:
        return {
            **{f"parameter {name}": one for name, one in self.parameters().items() if name not in self.strangers},
            **{f"optimizer state of {name}": one for name, one in self.optimizer_state().items()},
            **{f"buffer {name}": one for name, one in self.buffers().items()},
            # Tensors that an optimizer keeps on itself: Lookahead writes its slow weights at every k-th step.
            **{
                f"{name}.{attribute}{path}": tensor
                for name, optimizer in self.optimizers.items()
                for attribute, value in vars(optimizer).items()
                if attribute not in EVERY_OPTIMIZERS
                for path, tensor in _tensors_of(value)
            },
            **self.other_tensors(),
        }

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Return each parameter's gradient as it is now."""
        return {name: parameter.grad for name, parameter in self.parameters().items()}


def distinct_views(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out tensors that are the same view of the same memory as an earlier entry: tied weights, for example."""
    first: dict[int, torch.Tensor] = {}
    known: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in named.items():
        at = tensor.data_ptr() if tensor.layout == torch.strided else -id(tensor)
        if (other := first.get(at)) is None:  # the usual case, in which shape and strides need not be read
            first[at] = tensor
        else:
            known.add(view_of(other) or (id(other),))
            view = view_of(tensor) or (id(tensor),)
            if tensor.numel() and view in known:
                continue
            known.add(view)
        kept[name] = tensor
    return kept


def _tensors_of(value: Any, depth: int = 4) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an object's attributes and containers, with their paths, down to a depth of nesting."""
    if isinstance(value, torch.Tensor):
        yield "", value
        return
    if depth == 0 or isinstance(value, torch.nn.Module | torch.optim.Optimizer | type):
        return
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    elif hasattr(value, "__dict__"):
        items = [(f".{name}", item) for name, item in vars(value).items()]
    for step, item in items:
        for path, tensor in _tensors_of(item, depth - 1):
            yield step + path, tensor


class Parts:
    """Parameters of models and optimizers, and all modules; looked up once, and anew after `look_again`."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._parameters: list[torch.nn.Parameter] | None = None
        self._modules: list[torch.nn.Module] | None = None

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of models and optimizers."""
        if self._parameters is None:
            self._parameters = list(self._holdings.parameters().values())
        return self._parameters

    def modules(self) -> list[torch.nn.Module]:
        """Return all modules, whose mode (training or not) matters to a step."""
        if self._modules is None:
            self._modules = [module for root in self._holdings.modules.values() for module in root.modules()]
        return self._modules

    def look_again(self) -> None:
        """Look parameters and modules up anew: there may be others."""
        self._parameters = self._modules = None
