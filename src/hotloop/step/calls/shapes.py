"""The shapes that a step sees: which of them compiled code may see, and what to do where there are many."""

from __future__ import annotations

import collections
import inspect
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import mark_dynamic
from hotloop.decide import ShapePlan, plan_shapes
from hotloop.errors import ConfigError
from hotloop.measure import Census, Signature, TensorMeta, flatten, signature
from hotloop.step.calls.buckets import BUCKETS, MULTIPLE

if TYPE_CHECKING:
    from collections.abc import Callable

RECURS = 3
"""How often a shape must come before compiled code that has not seen it may: a short last batch never does."""
_MANY = 0.25
"""Where more than this share of the latest steps have shapes of their own, waiting for one to recur is no use."""
_LATEST = 40
_KNOWN = 4096
"""Kinds of inputs that are remembered, at most."""
_ADVISE_AFTER = 100


class Shapes:
    """Counts the shapes of one step's arguments.

    Args:
        step: the user's function, for the names of its arguments.
        odd_pays: tells whether a shape with so large a share of the steps is worth a compile; True where nobody knows.
    """

    def __init__(self, step: Callable[..., Any], odd_pays: Callable[[float], bool] = lambda _: True) -> None:
        self.census = Census()
        self.plan: ShapePlan | None = None
        """What to do about the shapes that a look at the batches found; None without one."""
        self._step, self._odd_pays = step, odd_pays
        self._ahead, self._fitted = Census(), False
        self._compiled: dict[str, set[Signature]] = collections.defaultdict(set)
        self._latest: collections.deque[bool] = collections.deque(maxlen=_LATEST)
        self._advised = False

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Count one call's shapes, and give them."""
        inputs = signature(args, kwargs)
        self.census.note(inputs)
        return inputs

    # -- before the first step -------------------------------------------------------------------------------------

    def see_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the shapes of a batch that is still to come."""
        self._ahead.note(signature(args, kwargs))

    def decide(self, declared: int = 0) -> ShapePlan | None:
        """Choose what to do about the shapes of the batches to come, where any were seen; as for `plan_shapes`."""
        seen: collections.Counter[Any] = collections.Counter()
        for inputs, count in self._ahead.counted():
            seen[_shapes(inputs)] += count
        self.plan = plan_shapes(seen, declared) if seen else None
        return self.plan

    def fits(self, inputs: Signature) -> bool:
        """Tell by its first call whether the step takes batches as they were seen; where not, the plan is dropped."""
        if self.plan is None or self._fitted:
            return True
        self._fitted = True
        if _ranks(_shapes(inputs)) not in {_ranks(one) for one in self.plan.seen}:
            self.plan = None
        return self.plan is not None

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the sizes that vary compiled for any value, from the first compile on; it runs at every step."""
        if self.plan is None or not self.plan.dynamic:
            return
        tensors = [one for one in flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        for place, dim in self.plan.dynamic:
            if place < len(tensors) and dim < tensors[place].ndim:
                mark_dynamic(tensors[place], dim)

    # -- at a step -------------------------------------------------------------------------------------------------

    def compiled(self, base: str, inputs: Signature) -> bool:
        """Tell whether compiled code has seen these shapes."""
        return inputs in self._compiled[base]

    @property
    def many(self) -> bool:
        """Tell whether most of the latest steps brought shapes or values of their own."""
        return len(self._latest) == _LATEST and sum(self._latest) > _MANY * _LATEST

    @property
    def one_code(self) -> bool:
        """Tell whether one code serves all shapes, so that another shape is no other code."""
        return self.many or (self.plan is not None and self.plan.choice == "dynamic")

    def may_compile(self, base: str, inputs: Signature) -> bool:
        """Tell whether compiled code should see these shapes; where it has not yet, it is compiled once more.

        The first shapes may, and those that the plan takes for common; others when they come back often enough for it
        to pay, or when most steps bring new ones: torch then makes the sizes dynamic, and one code serves all.
        """
        known = self._compiled[base]
        unseen = inputs not in known
        self._latest.append(unseen)
        if not unseen:
            return True
        seen = self.census.seen(inputs)
        recurs = seen is not None and seen.count >= RECURS and self._odd_pays(seen.share)
        if self.plan is not None:
            common = _shapes(inputs) in self.plan.common
            may = common or self.one_code or recurs
        else:
            may = not known or self.many or recurs
        # ``update=last``: models are called with the same shapes, and nothing is compiled anew.
        may = may or any(map(inputs.but_for_flags, known))
        if may:
            if len(known) == _KNOWN:  # a value or an object that is new in each call
                known.clear()
            known.add(inputs)
        return may

    # -- advice ----------------------------------------------------------------------------------------------------

    def advice_ahead(self) -> str:
        """Say which argument to put in buckets, from the batches to come; empty where that is no use."""
        if self.plan is None or self.plan.choice != "dynamic":
            return ""
        self._advised = True
        return self._bucket_advice(self._ahead)

    def advice(self) -> str:
        """Say once which argument to put in buckets, where its sizes keep changing; empty otherwise."""
        due = self.census.steps and self.census.steps % _ADVISE_AFTER == 0
        if self._advised or not due or self.census.new_in_last(_ADVISE_AFTER) < _LATEST:
            return ""
        found = self._bucket_advice(self.census)
        self._advised = bool(found)
        return found

    def _bucket_advice(self, census: Census) -> str:
        varying = max(census.varying_dims(), key=lambda dim: dim.distinct, default=None)
        if varying is None:
            return ""
        try:
            edges = census.suggest_buckets(varying.name, varying.dim, BUCKETS, multiple=MULTIPLE)
        except ConfigError:
            return ""
        name = self.argument(varying.name)
        return (
            f"{name} had {varying.distinct} sizes in dimension {varying.dim}, {varying.least} to {varying.most}: each "
            "new one costs set-up time, and is not captured. Declare "
            f"buckets={{{name!r}: hotloop.Pad(dim={varying.dim}, value=..., to={edges.edges})}}, "
            f"which would pad {edges.waste:.0%}: that pays where a captured step is {1 / (1 - edges.waste):.2f} times "
            "as fast, or more"
        )

    def argument(self, name: str) -> str:
        """Give the name that a user knows, and `buckets` takes: of the argument, or of the entry in a mapping."""
        if "." in name:
            return name.rpartition(".")[2]
        if name.startswith("args["):
            index = int(name.removeprefix("args[").partition("]")[0])
            parameters = list(inspect.signature(self._step).parameters)
            return parameters[index] if index < len(parameters) else name
        return name


def _shapes(inputs: Signature) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in inputs.leaves if isinstance(leaf, TensorMeta))


def _ranks(shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return tuple(len(shape) for shape in shapes)
