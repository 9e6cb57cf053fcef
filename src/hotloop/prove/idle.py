"""A step that trains nothing agrees with itself whatever compiled code does: it is refused, not passed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hotloop.step.state.holdings import Holdings


@contextlib.contextmanager
def noting_backward(holdings: Holdings) -> Iterator[set[int]]:
    """Note the parameters that a backward reaches in the block, also where an optimizer skips its step."""
    reached: set[int] = set()

    def note(parameter: torch.Tensor) -> None:
        reached.add(id(parameter))

    trained = [one for one in holdings.parameters().values() if one.requires_grad]
    handles = [one.register_post_accumulate_grad_hook(note) for one in trained]  # type: ignore[no-untyped-call]
    try:
        yield reached
    finally:
        for handle in handles:
            handle.remove()


def refuse_idle(holdings: Holdings, step: Callable[[], Any]) -> None:
    """Run a step of a program whose backward reached nothing: one that updates by itself trains all the same.

    Raises:
        ConfigError: the step changes nothing.
    """
    before = {name: one.clone() for name, one in holdings.tensors().items()}
    step()
    if all(torch.equal(one, before[name]) for name, one in holdings.tensors().items() if name in before):
        raise ConfigError(
            "Workload step: it gave no parameter a gradient and changed nothing, so there is no training to judge: "
            "expected the whole step, with loss.backward() and optimizer.step()"
        )
