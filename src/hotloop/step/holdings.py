"""What a step may change: parameters, gradients, buffers, optimizer state, what else the user named, random state."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch

from hotloop._torch.foreach import copies, copy_all

_Kind = TypeVar("_Kind")
_DEPTH = 4
_EVERY_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
"""Attributes that each optimizer has: its groups, state and hooks."""
_CHUNK_BYTES = 64 * 2**20
"""Tensors are exchanged in groups of at most this size (or one by one, if larger), so that little extra is needed."""


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
        return _once(named)

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
            if attribute not in _EVERY_OPTIMIZERS
            for path, tensor in _tensors_of(value, _DEPTH)
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give every tensor that a step may write into, but for gradients, each memory once."""
        objects = self.objects()
        return _once({name: in_place(one) for name, one in objects.items()})

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


def _once(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out what shares an entry's whole memory: tied weights, an EMA's live reference."""
    seen: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in named.items():
        dense = tensor.layout == torch.strided
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if dense else (id(tensor),)
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            kept[name] = tensor
    return kept


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


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Give the memory that a tensor has now, without gradients: a later ``tensor.data = other`` leaves it as it is.

    A sparse tensor has several, and is given itself.
    """
    return tensor.detach() if tensor.layout == torch.strided else tensor


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Give where the memory of each begins; 0 of a sparse tensor, and of one that is spread over processes."""
    return [one.data_ptr() if one.layout == torch.strided else 0 for one in tensors]


class Memory:
    """Which memory tensors have: ``tensor.data = other`` gives a tensor other memory, and neither counts as a write.

    Args:
        tensors: the objects that the program knows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._at = list(tensors), addresses(tensors)
        self._had = [in_place(one) for one in tensors]

    def moved(self) -> list[int]:
        """Give the places of the tensors that have another memory now."""
        now = addresses(self._tensors)
        return [] if now == self._at else [place for place, at in enumerate(self._at) if now[place] != at]

    def restore(self) -> None:
        """Give each the memory that it had; what is in it is not touched."""
        for place in self.moved():
            self._tensors[place].data = self._had[place]

    def bring_back(self) -> None:
        """Give each the memory that it had, with what the tensor holds now."""
        for place in self.moved():
            tensor, had = self._tensors[place], self._had[place]
            had.copy_(tensor.detach())
            tensor.data = had


class Bindings:
    """What holds those tensors in Python: gradients, the optimizers' dictionaries, attributes of the other state.

    An optimizer's own attributes as well: one of the user's may count its steps, and those that are undone are none.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._parameters = list(holdings.parameters().values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._optimizers = [
            (
                optimizer,
                [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups],
                [(key, entry, _copied(entry)) for key, entry in optimizer.state.items()],
                [(name, one, _copied(one)) for name, one in vars(optimizer).items() if name not in _EVERY_OPTIMIZERS],
            )
            for optimizer in holdings.optimizers.values()
        ]
        self._others = [
            (one, {name: _copied(value) for name, value in vars(one).items()})
            for one in holdings.state
            if not isinstance(one, torch.nn.Module) and hasattr(one, "__dict__")
        ]

    def restore(self) -> None:
        """Bind everything as it was; the tensors themselves are not touched."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for optimizer, groups, state, attributes in self._optimizers:
            for group, values in groups:
                group.clear()
                group.update({**values, "params": list(values["params"])})
            optimizer.param_groups[:] = [group for group, _ in groups]
            optimizer.state.clear()
            for key, entry, values in state:
                optimizer.state[key] = entry
                if isinstance(entry, MutableMapping):  # the same dictionary, which recordings know
                    entry.clear()
                    entry.update(_copied(values))
            for name in vars(optimizer).keys() - _EVERY_OPTIMIZERS - {name for name, _, _ in attributes}:
                delattr(optimizer, name)
            for name, one, value in attributes:
                _fill(one, value)
                vars(optimizer)[name] = one
        for one, values in self._others:
            vars(one).clear()
            vars(one).update({name: _copied(value) for name, value in values.items()})


def _copied(value: Any) -> Any:
    """Copy containers, whose content may change in place; not what they hold."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copied(item)
        return copied
    return [_copied(item) for item in value] if type(value) is list else value


def _fill(container: Any, values: Any) -> None:
    """Have a list or a dictionary hold what it held when it was copied; leave anything else alone."""
    if type(container) is dict:
        container.clear()
        container.update(_copied(values))
    elif type(container) is list:
        container[:] = _copied(values)


class RandomState:
    """The positions of the random streams that a step may draw from: Python's, numpy's, torch's on CPU and GPU.

    Args:
        devices: where numbers may be drawn.
        python: also those of Python and numpy, which a replay never draws from; they take the longest to read.
    """

    def __init__(self, devices: Sequence[torch.device], *, python: bool = True) -> None:
        self._python = random.getstate() if python else None
        numpy = sys.modules.get("numpy") if python else None
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]

    def restore(self) -> None:
        """Go back to these positions."""
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def moved_since(self, earlier: RandomState) -> list[str]:
        """Name the streams whose position differs from an earlier one."""
        moved = []
        if self._python != earlier._python:
            moved.append("Python's random")
        if self._numpy is not None and earlier._numpy is not None and not _same_numpy(self._numpy, earlier._numpy):
            moved.append("numpy.random")
        if not torch.equal(self._cpu, earlier._cpu):
            moved.append("torch's CPU generator")
        pairs = zip(self._cuda, earlier._cuda, strict=True)
        return moved + [f"the generator of {a[0]}" for a, b in pairs if not torch.equal(a[1], b[1])]


def _same_numpy(ours: Any, theirs: Any) -> bool:
    return ours[0] == theirs[0] and bool((ours[1] == theirs[1]).all()) and tuple(ours[2:]) == tuple(theirs[2:])


class Snapshot:
    """Everything that a step may change, copied: the step can be undone, or run twice.

    Args:
        holdings: what may change.
        devices: where random numbers may be drawn.
        everything: parameters and optimizer state too; else buffers, other state and gradients only, which is enough
            as long as no optimizer has stepped.
        gradients: whether the gradients that exist have to be copied; False where the step never reads them.

    Memory: one copy of the tensors, on their device; where that does not fit, in host memory (`on_host` is True then).
    """

    def __init__(
        self, holdings: Holdings, devices: Sequence[torch.device], *, everything: bool = True, gradients: bool = True
    ) -> None:
        self.random = RandomState(devices)
        with holdings.still():
            self.bindings = Bindings(holdings)
            objects = holdings.objects()
            existing = {f"gradient {name}": one for name, one in holdings.gradients().items() if one is not None}
            self._memory = Memory([*objects.values(), *existing.values()])
            if everything:
                self.live = holdings.tensors()
            else:
                buffers = {f"buffer {name}": one for name, one in holdings.buffers().items()}
                others = {**buffers, **holdings.other_tensors()}
                self.live = _once({name: in_place(one) for name, one in others.items()})
            if gradients:
                self.live = _once({**self.live, **{name: in_place(one) for name, one in existing.items()}})
        sparse = [name for name, one in self.live.items() if one.layout != torch.strided]
        self._rebound = {name: self.live.pop(name) for name in sparse}
        self._sparse = {name: one.clone() for name, one in self._rebound.items()}
        self.on_host = not _fits(self.live.values())
        self.saved = {name: _like(one, on_host=self.on_host) for name, one in self.live.items()}
        copy_all(list(self.saved.values()), list(self.live.values()))

    @property
    def nbytes(self) -> int:
        """How much memory the copies take."""
        return sum(_bytes(one) for one in self.saved.values())

    def restore(self) -> None:
        """Undo: values, memory, bindings and random streams are as they were."""
        self._memory.restore()
        copy_all(list(self.live.values()), list(self.saved.values()))
        self._restore_rest()

    def exchange(self) -> None:
        """Undo, and keep in `saved` what the undone step had made in the memory of each tensor."""
        self._memory.restore()
        for names in chunks(self.live):
            live, saved = [self.live[name] for name in names], [self.saved[name] for name in names]
            between = copies(live)
            copy_all(live, saved)
            copy_all(saved, between)
        self._restore_rest()

    def _restore_rest(self) -> None:
        self.bindings.restore()
        self.random.restore()
        for name, tensor in self._rebound.items():
            with torch.no_grad():
                tensor.copy_(self._sparse[name])


def _like(tensor: torch.Tensor, *, on_host: bool) -> torch.Tensor:
    if not on_host or tensor.device.type == "cpu":
        return torch.empty_like(tensor, requires_grad=False)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _fits(tensors: Iterator[torch.Tensor] | Any) -> bool:
    """Tell whether a GPU has room for a copy, with a fifth to spare for what the step itself needs beyond its peak."""
    needed: dict[torch.device, int] = {}
    for tensor in tensors:
        if tensor.device.type == "cuda":
            needed[tensor.device] = needed.get(tensor.device, 0) + _bytes(tensor)
    for device, size in needed.items():
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if size * 1.2 > free + unused:
            return False
    return True


def chunks(tensors: Mapping[str, torch.Tensor], parts: int | None = None) -> Iterator[list[str]]:
    """Give the tensors' names in parts so small that another copy of one is no matter.

    Args:
        tensors: by name.
        parts: as many of about one size, if that is larger: fewer calls take less time.
    """
    most = max(_CHUNK_BYTES, sum(map(_bytes, tensors.values())) // parts if parts else 0)
    chunk: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if chunk and size + _bytes(tensor) > most:
            yield chunk
            chunk, size = [], 0
        chunk.append(name)
        size += _bytes(tensor)
    if chunk:
        yield chunk
