"""Everything that a step may change, and where it lies in memory.

Parameters, gradients, buffers, optimizer state, and objects that the user named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from hotloop._torch import pools
from hotloop._torch.sharded import Sharded, is_spread, shard_of
from hotloop._torch.views import can_be_guarded, guard
from hotloop.measure import flatten
from hotloop.step.obstacle import Obstacle

_T = TypeVar("_T")
EVERY_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
"""Attributes that each optimizer has: its groups, state and hooks."""
_KEPT = "leave that to its default between calls: accumulate within one call, say, or train with run='eager'"


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
        """Return what `tensors` names, as the objects that the program knows; also those that share memory.

        Of tensors that are spread over processes these are this process's shards.
        """
        with self.still():
            return self._cached("objects", self._find_shards)

    def _find_shards(self) -> dict[str, torch.Tensor]:
        return {name: shard_of(tensor) for name, tensor in self._find_objects().items()}

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

    def keep_outside(self, result: Any) -> None:
        """Move what outlives a step that ran in the memory of recordings out of it: a replay would overwrite it."""
        if pools.has_left():
            leaves = [one for one in flatten(result)[0] if isinstance(one, torch.Tensor)]
            gradients = [shard_of(one) for one in self.gradients().values() if one is not None]
            pools.keep([*map(shard_of, leaves), *gradients, *self.objects().values()])


def distinct_views(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out tensors that are the same view of the same memory as an earlier entry: tied weights, for example."""
    first: dict[int, torch.Tensor] = {}
    known: set[tuple[Any, ...]] = set()
    kept = {}
    for name, tensor in named.items():
        # Of a tensor that stands for others the address is 0, as of the next.
        at = (tensor.data_ptr() if tensor.layout == torch.strided else 0) or -id(tensor)
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
        self._found: dict[str, Any] = {}

    def _once(self, what: str, find: Callable[[], _T]) -> _T:
        if what not in self._found:
            self._found[what] = find()
        found: _T = self._found[what]
        return found

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters of models and optimizers."""
        return self._once("parameters", lambda: list(self._holdings.parameters().values()))

    def modules(self) -> list[torch.nn.Module]:
        """Return all modules, whose mode (training or not) matters to a step."""
        return self._once("modules", lambda: [one for root in self._roots() for one in root.modules()])

    def wrappers(self) -> list[DistributedDataParallel]:
        """Return the wrappers that reduce gradients over several processes, or not, as ``no_sync()`` sets them."""
        return self._once("wrappers", lambda: [one for root in self._roots() for one in wrappers_in(root)])

    def sharded(self) -> Sharded:
        """Return what FSDP2 has sharded of the modules."""
        return self._once("sharded", lambda: Sharded(self._roots()))

    def _roots(self) -> list[torch.nn.Module]:
        return list(self._holdings.modules.values())

    def kept(self) -> Obstacle | None:
        """Return what FSDP2 keeps for the coming call, of which no undo and no recording knows; None where nothing."""
        why = self.sharded().why_not_recorded()
        return Obstacle(f"parameters are sharded (FSDP2), and {why}", _KEPT) if why else None

    def reduces(self) -> bool:
        """Return whether the coming call reduces gradients over several processes, as far as wrappers say."""
        return bool(self.sharded()) or any(one.require_backward_grad_sync for one in self.wrappers())

    def look_again(self) -> None:
        """Look parameters and modules up anew: there may be others."""
        self._found = {}


def wrappers_in(root: torch.nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers for several processes in a model, itself among them."""
    return [module for module in root.modules() if isinstance(module, DistributedDataParallel)]


def in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that a tensor has now, without gradients; a later ``tensor.data = other`` does not change it.

    A sparse tensor has several pieces of memory, and is returned itself. Of a tensor that is spread over processes the
    memory is that of this process's shard.
    """
    tensor = shard_of(tensor)
    return tensor.detach() if tensor.layout == torch.strided else tensor


def view_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return address, shape, strides and dtype: ``tensor.t_()`` keeps the address, but not the strides.

    Empty for a sparse tensor. Of a tensor that is spread over processes it describes this process's shard.
    """
    tensor = shard_of(tensor)
    try:
        if tensor.layout == torch.strided and (address := tensor.data_ptr()) is not None:
            return address, tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, NotImplementedError):  # a wrapper subclass without memory of its own
        pass
    return ()


class Views:
    """A quick check whether tensors still are the same views of the same memory, as `view_of` describes them.

    Hundreds of tensors are checked before each replay. Each is asked for its address. Shapes and strides would take
    three times as long: a guard of torch's compiler compares those of all tensors in one call.

    Args:
        tensors: the tensors; those without an address are ignored.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        given = list(tensors)
        self._shards = [(tensor, shard_of(tensor)) for tensor in given if is_spread(tensor)]
        """Tensors that are spread over processes: one may get another shard (``load_state_dict(assign=True)``)."""
        views = {id(tensor): (tensor, view_of(tensor)) for tensor in map(shard_of, given)}
        self._then = [(tensor, view) for tensor, view in views.values() if view]
        self._tensors = [tensor for tensor, _ in self._then]
        self._addresses = [view[0] for _, view in self._then]
        self._guarded = [tensor for tensor in self._tensors if can_be_guarded(tensor)]
        self._unguarded = [(tensor, view) for tensor, view in self._then if not can_be_guarded(tensor)]
        self._guard: Callable[[], bool] | None = None
        self._guards_left = 4  # where torch's modes change all the time, a new guard would never be of use

    def same(self) -> bool:
        """Return whether every tensor has the same memory, shape, strides and dtype as before."""
        if any(shard_of(tensor) is not shard for tensor, shard in self._shards):
            return False
        try:
            if [*map(torch.Tensor.data_ptr, self._tensors)] != self._addresses:
                return False
        except (RuntimeError, NotImplementedError):  # swap_tensors put a tensor without an address in its place
            return False
        if self._guard is not None and self._guard():
            return all(view_of(tensor) == then for tensor, then in self._unguarded)
        if self.moved():
            return False
        if self._guards_left:
            self._guards_left -= 1
            self._guard = guard(self._guarded)
        return True

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors that have other memory, or another shape, strides or dtype; the shards of those spread."""
        replaced = [shard for tensor, shard in self._shards if shard_of(tensor) is not shard]
        return [*replaced, *(tensor for tensor, then in self._then if view_of(tensor) != then)]


class Memory:
    """The memory that tensors have: ``tensor.data = other`` changes it, which torch does not count as a write.

    A tensor that becomes another view of the same memory (``tensor.t_()``) counts as moved, too.

    Args:
        tensors: the objects that the program knows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._views = [*map(shard_of, tensors)], Views(tensors)
        self._at = [*map(view_of, self._tensors)]
        self._had = [*map(in_place, self._tensors)]

    def moved(self) -> list[int]:
        """Return the indices of the tensors that have other memory now."""
        if self._views.same():
            return []
        pairs = enumerate(zip(self._tensors, self._at, strict=True))
        return [place for place, (tensor, at) in pairs if view_of(tensor) != at]

    def restore(self) -> None:
        """Put each tensor back on the memory that it had; the values in that memory are not touched."""
        for place in self.moved():
            self._tensors[place].data = self._had[place]

    def bring_back(self) -> None:
        """Put each tensor back on the memory that it had, with the values that the tensor holds now.

        Raises:
            RuntimeError: a tensor has another shape now, so it lacks values; or it has the memory of another tensor,
                so a write into one would change both.
        """
        places = self.moved()
        if not places:
            return
        views = map(view_of, {id(tensor): tensor for tensor in self._tensors}.values())
        addresses = [view[0] for view in views if view and view[0]]
        if len(addresses) > len({*addresses}):
            raise RuntimeError("a tensor was given the memory of another one")
        for place in places:
            tensor, had = self._tensors[place], self._had[place]
            if tensor.shape != had.shape:
                raise RuntimeError(f"a tensor of {tuple(had.shape)} was given the shape {tuple(tensor.shape)}")
            had.copy_(tensor.detach().clone())  # through a copy, since the two may be views of one memory
            tensor.data = had
