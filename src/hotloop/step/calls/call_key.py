"""The key of a call, which says what kind of call it is: what a recording freezes, and no later look would show.

Its parts are the signature of the arguments, which of them are one tensor, which gradients exist, the modes of modules,
and torch's own modes.
"""

from __future__ import annotations

import bisect
import itertools
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop._torch.ambient import function_modes, matmul_precision, saved_tensors_hooks
from hotloop._torch.dynamo import attributes_of
from hotloop._torch.places import span_of
from hotloop._torch.sharded import shard_of
from hotloop.step.naming import with_article
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from hotloop.measure import Signature
    from hotloop.step.state.holdings import Parts


class Aliasing(NamedTuple):
    """The part of a call's key that its signature lacks."""

    shared: tuple[int, ...]
    """For each tensor the index of the first one that is the same object. Empty where each is another one."""
    attributes: tuple[tuple[int, str], ...]
    """The attributes that a program put on argument tensors: index of the leaf, and name."""

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Aliasing:
        """Return the aliasing of the leaves of a call's arguments; it runs before each replay."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        ids = [*map(id, tensors)]
        shared = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()
        if not any(map(vars, tensors)):
            return cls(shared, ())
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        pairs = zip(places, tensors, strict=True)
        return cls(shared, tuple((place, name) for place, tensor in pairs for name in attributes_of(tensor)))


class Regions:
    """The memory of some tensors, as regions in which other tensors are looked up.

    Args:
        tensors: the tensors; those without an address have no region.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._begins, self._ends = list[int](), list[int]()
        for begins, ends in sorted(set(map(_span, tensors)) - {(0, 0)}):
            if self._ends and begins < self._ends[-1]:
                self._ends[-1] = max(ends, self._ends[-1])
            else:
                self._begins.append(begins)
                self._ends.append(ends)

    def of(self, leaves: Sequence[Any]) -> list[int]:
        """Return for each leaf the number of the region that it has memory in; -1 if it has none in any."""
        return [self._of(leaf) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves]

    def _of(self, tensor: torch.Tensor) -> int:
        begins, ends = _span(tensor)
        last = bisect.bisect_left(self._begins, ends) - 1
        return last if last >= 0 and self._ends[last] > begins else -1


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's memory begins and ends; twice 0 if it has none with an address."""
    tensor = shard_of(tensor)
    try:
        begins = tensor.data_ptr()
        if not begins:
            return 0, 0
        size = tensor.nbytes if tensor.is_contiguous() else span_of(tensor) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and wrapper subclasses without memory
        return 0, 0
    return begins, begins + size


def ambient_modes() -> Hashable:
    """Return the settings of torch that are in force around a step and change what it computes."""
    backends: Any = torch.backends  # the types that torch ships do not know all of these settings
    matmul = backends.cuda.matmul
    if torch.cuda.is_available():
        kinds: tuple[str, ...] = ("cuda", "cpu")
        precisions: tuple[Any, ...] = (
            matmul.fp32_precision,
            backends.cudnn.conv.fp32_precision,
            backends.cudnn.rnn.fp32_precision,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_accumulation,
        )
    else:
        kinds = ("cpu",)
        precisions = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.get_default_dtype(),
        matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cudnn.enabled,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        # which kernels scaled_dot_product_attention may use
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        *precisions,
        *function_modes(),
        saved_tensors_hooks(),
    )


def key_of(signature: Signature, aliasing: Aliasing, parts: Parts) -> Hashable:
    """Return the key of the coming call.

    Args:
        signature: shapes, dtypes and values of its arguments.
        aliasing: which arguments are one tensor.
        parts: parameters, of which the key holds whose gradient exists, and modules, of which it holds the mode.
    """
    return signature, aliasing, *modes_of(parts), ambient_modes()


def modes_of(parts: Parts) -> tuple[tuple[Any, ...], ...]:
    """Return whose gradient exists, which modules train, and what wrappers for several processes send and reduce."""
    gradients = tuple([parameter.grad is None for parameter in parts.parameters()])
    modes = tuple([module.training for module in parts.modules()])
    wrappers = parts.wrappers()
    syncs = [(one.require_forward_param_sync, one.require_backward_grad_sync) for one in wrappers] if wrappers else ()
    return gradients, modes, (*itertools.chain(*syncs), *parts.sharded().settings())


FRESH = 16
"""Consecutive calls, each with another object or value, after which the argument is taken to differ in every call."""


class UnstableArguments:
    """The arguments that differed in all consecutive calls of one step, as far as these calls were of a new kind.

    Args:
        argument: returns the name of an argument that its user knows.
    """

    def __init__(self, argument: Callable[[str], str]) -> None:
        self._argument = argument
        self._calls = 0
        self._seen: dict[int, set[Any]] = {}
        """The values of each argument that differed in all consecutive calls."""

    def obstacle(self, inputs: Signature, aliasing: Aliasing, *, new: bool) -> Obstacle | None:
        """Return which argument prevents a recording, if one does; an argument that is new in each call only once.

        Args:
            inputs: the signature of a call.
            aliasing: the rest of the call's key.
            new: no call of the same kind came before.
        """
        for name, type_name in inputs.unhashed().items() if not inputs.exact else ():
            what = f"argument {self._argument(name)} cannot be compared from call to call: it is"
            hint = "pass tensors, numbers and strings, alone or in lists and mappings"
            return Obstacle(f"{what} {with_article(type_name)}", hint)
        for place, name in aliasing.attributes:
            what = f"argument {self._argument(inputs.names()[place])} has an attribute {name}"
            return Obstacle(f"{what}, whose value a recording would freeze", "pass it as an argument of its own")
        if not new:
            self._seen, self._calls = {}, 0
            return None
        if self._calls == FRESH:  # it was reported
            return None
        values = inputs.values()
        still = {place: one for place, one in values.items() if place in self._seen and one not in self._seen[place]}
        if not still:  # something else was new: a shape, for example
            self._calls, self._seen = 0, {place: set() for place in values}
            still = values
        self._calls += 1
        self._seen = {place: {*self._seen[place], value} for place, value in still.items()}
        return self._obstacle_at(inputs, next(iter(self._seen))) if self._seen and self._calls == FRESH else None

    def _obstacle_at(self, inputs: Signature, place: int) -> Obstacle:
        name, kind = self._argument(inputs.names()[place]), inputs.leaves[place][0]
        what = f"argument {name} is {with_article(kind.__name__)}, and another one in each of {FRESH} calls"
        if place in inputs.objects():
            return Obstacle(what, "pass tensors, alone or in a dict or a dataclass, or the same object in each call")
        hint = "leave it out of the step; an argument of a few values that come again (update=True) may stay"
        if issubclass(kind, numbers.Number):
            hint = f"pass it as a tensor, torch.tensor({name}), which one recording takes whatever its value, or {hint}"
        return Obstacle(f"{what}: each value selects a recording of its own", hint)
