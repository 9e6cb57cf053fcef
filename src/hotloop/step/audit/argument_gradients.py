"""Tells which arguments of a step a backward in it may reach."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from collections.abc import Iterable

GRADIENTS_OF_ARGUMENTS = Obstacle(
    "an argument requires gradients",
    "set requires_grad inside the step, on a copy: a proof runs the step twice, and would add to such gradients twice",
    not_repeatable=True,
)
_CARRIED = dataclasses.replace(
    GRADIENTS_OF_ARGUMENTS,
    hint="what an earlier step returned (the hidden state of an LSTM): detach it where it is returned, return "
    "hidden.detach(); what else computes an argument belongs into the step. A proof runs the step twice, and would add "
    "to such gradients twice",
)


def gradients_of(arguments: Iterable[Any]) -> Obstacle | None:
    """Return the obstacle that a backward in the step may reach an argument's gradients; None where none can.

    A backward has freed the graph of a hidden state that an earlier step returned: no other backward goes through it.
    """
    asking = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]
    if any(one.is_leaf for one in asking):
        return GRADIENTS_OF_ARGUMENTS
    return None if all(map(was_freed, asking)) else _CARRIED
