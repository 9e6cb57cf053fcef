"""The key of a call: what a recording freezes, and what no look at the program before a replay would show."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.step.state.ambient import ambient_modes

if TYPE_CHECKING:
    from collections.abc import Hashable

    from hotloop.measure import Signature
    from hotloop.step.calls.aliasing import Aliasing
    from hotloop.step.state.parts import Parts


def key_of(signature: Signature, aliasing: Aliasing, parts: Parts) -> Hashable:
    """Return the key of the coming call.

    Args:
        signature: shapes, dtypes and values of its arguments.
        aliasing: which arguments are one tensor, or share memory.
        parts: parameters, of which the key holds whose gradient exists, and modules, of which it holds the mode.
    """
    gradients = tuple([parameter.grad is None for parameter in parts.parameters()])
    modes = tuple([module.training for module in parts.modules()])
    return signature, aliasing, gradients, modes, ambient_modes()
