"""Compares the step of a run's optimizers with eager's optimizers on the same gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop.measure import differences
from hotloop.step.capture.optimizers import repeatable, step_again
from hotloop.step.state.snapshot import chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hotloop.measure import Difference
    from hotloop.step.state.holdings import Holdings


def beside_own_gradients(
    holdings: Holdings, theirs: Mapping[str, torch.Tensor | None], parameters: Collection[str]
) -> dict[str, Difference]:
    """Compare a run's parameters and optimizer state with those of eager's optimizer on the run's own gradients.

    Adam divides a gradient by its own size. A gradient that is only rounding (of the bias of keys that are only
    compared) becomes a full step in any direction, so no repeat of the step shows how far two right runs are apart
    there. Given the same gradients, which are judged themselves, an optimizer repeats itself.

    Args:
        holdings: the program, as it is before the step.
        theirs: the values that the run left, named by `hotloop.step.prove.proof.values_of`.
        parameters: the names of the parameters to compare.

    Returns:
        the differences by name, for optimizers whose step can be repeated. Nothing for an optimizer whose gradients are
        sparse or not finite: a GradScaler leaves such a step out. If memory runs out, the rest is missing, and is
        judged by the reference, noise and all.

    Raises:
        Exception: an exception of an optimizer's step on copies.
    """
    named = {id(parameter): name for name, parameter in holdings.parameters().items()}
    found: dict[str, Difference] = {}
    try:
        for optimizer in filter(repeatable, holdings.optimizers.values()):
            stepped = {}
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                gradient = theirs.get(f"gradient of {named[id(parameter)]} at the optimizer step")
                if gradient is not None:
                    stepped[named[id(parameter)]] = parameter, gradient
            gradients = [gradient for _, gradient in stepped.values()]
            dense = all(gradient.layout == torch.strided for gradient in gradients)
            if not dense or not torch.nn.utils.get_total_norm(gradients).isfinite():
                continue
            chosen = {name: parameter for name, (parameter, _) in stepped.items() if name in parameters}
            # In eight parts: the copy of a part is small beside the copy of everything that a proof makes.
            for part in chunks(chosen, sum(parameter.nbytes for parameter in chosen.values()) // 8):
                made: dict[str, torch.Tensor] = {}
                again = step_again(optimizer, *zip(*(stepped[name] for name in part), strict=True))
                for name, (value, state) in zip(part, again, strict=True):  # with the names of `values_of`
                    made[f"parameter {name}"] = value
                    tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
                    made |= {f"optimizer state of {name}: {key}": one for key, one in tensors.items()}
                found |= differences(made, {name: theirs.get(name) for name in made}, sized=False)[0]
    except torch.OutOfMemoryError:
        pass
    return found
