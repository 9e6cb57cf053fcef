"""The shapes that a step sees: which of them compiled code may see, and what to do if there are many."""

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
"""How often a shape must come before compiled code sees it for the first time: a short last batch never does."""
_LATEST = 40
"""The latest steps, among which new shapes are counted."""
_ADVISE_AFTER = 100
"""Steps after which, and in which, sizes that keep changing lead to advice."""
_KNOWN = 4096
"""The most kinds of inputs that are remembered."""


class Shapes:
    """The shapes of one step's arguments, counted.

    Args:
        step: the user's function, for the names of its arguments.
        odd_pays: returns whether a shape with this share of the steps is worth a compile; True if that is unknown.
    """

    def __init__(self, step: Callable[..., Any], odd_pays: Callable[[float], bool] = lambda _: True) -> None:
        self.census = Census()
        self.plan: ShapePlan | None = None
        """The plan for the shapes that a look at the batches found; None without a look."""
        self._step, self._odd_pays = step, odd_pays
        self._ahead, self._fitted = Census(), False
        self._compiled: dict[str, set[Signature]] = collections.defaultdict(set)
        self._latest: collections.deque[bool] = collections.deque(maxlen=_LATEST)
        self._advised = False

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        """Count one call's shapes, and return them."""
        inputs = signature(args, kwargs)
        self.census.note(inputs)
        return inputs

    # -- before the first step -------------------------------------------------------------------------------------

    def see_ahead(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the shapes of a batch that is still to come."""
        self._ahead.note(signature(args, kwargs))

    def decide(self, declared: int = 0) -> ShapePlan | None:
        """Choose the plan for the shapes of the batches to come, if any were seen; arguments as for `plan_shapes`."""
        seen: collections.Counter[Any] = collections.Counter()
        for inputs, count in self._ahead.counted():
            seen[_shapes(inputs)] += count
        self.plan = plan_shapes(seen, declared) if seen else None
        return self.plan

    def fits(self, inputs: Signature) -> bool:
        """Return, at its first call, whether the step takes batches of the kind that was seen; else drop the plan."""
        if self.plan is None or self._fitted:
            return True
        self._fitted = True
        seen = {tuple(map(len, shapes)) for shapes in self.plan.seen}
        if tuple(map(len, _shapes(inputs))) not in seen:
            self.plan = None
        return self.plan is not None

    def mark(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the sizes that vary as dynamic, from the first compile on; it runs at every step."""
        if self.plan is None or not self.plan.dynamic:
            return
        tensors = [leaf for leaf in flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        for place, dim in self.plan.dynamic:
            if place < len(tensors) and dim < tensors[place].ndim:
                mark_dynamic(tensors[place], dim)

    # -- at a step -------------------------------------------------------------------------------------------------

    def compiled(self, base: str, inputs: Signature) -> bool:
        """Return whether compiled code has seen these shapes."""
        return inputs in self._compiled[base]

    @property
    def many(self) -> bool:
        """Whether over a quarter of the latest steps had new shapes or values: waiting for a recurrence is vain."""
        return len(self._latest) == _LATEST and sum(self._latest) > _LATEST / 4

    @property
    def one_code(self) -> bool:
        """Whether the same code serves all shapes, so that another shape needs no other code."""
        return self.many or (self.plan is not None and self.plan.choice == "dynamic")

    def may_compile(self, base: str, inputs: Signature) -> bool:
        """Return whether compiled code should see these shapes; shapes that are new to it are compiled once more.

        The first shapes may be compiled, and those that the plan takes for common. Others may if they come back often
        enough for it to pay, or if most steps bring new shapes: torch then makes the sizes dynamic, and the same code
        serves all.
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
        """Return which argument to put in buckets, from the batches to come; empty if buckets are no use."""
        if self.plan is None or self.plan.choice != "dynamic":
            return ""
        self._advised = True
        return self._bucket_advice(self._ahead)

    def advice(self) -> str:
        """Return, once, which argument to put in buckets if its sizes keep changing; empty otherwise."""
        due = self.census.steps and self.census.steps % _ADVISE_AFTER == 0
        if self._advised or not due or self.census.new_in_last(_ADVISE_AFTER) < _LATEST:
            return ""
        advice = self._bucket_advice(self.census)
        self._advised = bool(advice)
        return advice

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
        """Return the name that a user knows, and `buckets` takes: of the argument, or of the entry in a mapping."""
        if "." in name:
            return name.rpartition(".")[2]
        if name.startswith("args["):
            index = int(name.removeprefix("args[").partition("]")[0])
            parameters = list(inspect.signature(self._step).parameters)
            return parameters[index] if index < len(parameters) else name
        return name


def _shapes(inputs: Signature) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(leaf.shape) for leaf in inputs.leaves if isinstance(leaf, TensorMeta))
