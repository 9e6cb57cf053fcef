"""What a run's optimizers made of the gradients that they found, held against eager's optimizers on the same ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop.measure import differences
from hotloop.step.capture.optimizers import repeatable, step_again
from hotloop.step.state.snapshot import chunks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from hotloop.measure import Difference
    from hotloop.step.state.holdings import Holdings

_PARTS = 8
"""Parts that an optimizer's step is repeated in: a copy of one is little beside the copy of all that a proof makes."""


def beside_own_gradients(
    holdings: Holdings, theirs: Mapping[str, torch.Tensor | None], parameters: Collection[str]
) -> dict[str, Difference]:
    """Hold what a run made of parameters and optimizer state against eager's optimizer on the run's own gradients.

    Adam divides a gradient by its own size, so of one that is rounding (of the bias of keys that are only compared) it
    makes a full step in any direction: no repeat of the step tells how far two right ones are apart there. Given the
    same gradients, which are judged themselves, an optimizer repeats itself.

    Args:
        holdings: the program's, as they are before the step.
        theirs: what the run left, named by `hotloop.step.prove.proof.values_of`.
        parameters: of which, by name.

    Returns:
        the differences by name, of optimizers whose step can be taken again. None where gradients are sparse, or not
        finite: a GradScaler leaves such a step out. Those that there was memory for: the others are judged by the
        reference, noise and all.

    Raises:
        Exception: whatever an optimizer's step on copies raised.
    """
    named = {id(one): name for name, one in holdings.parameters().items()}
    found: dict[str, Difference] = {}
    try:
        for optimizer in filter(repeatable, holdings.optimizers.values()):
            stepped = {}
            for one in (one for group in optimizer.param_groups for one in group["params"]):
                gradient = theirs.get(f"gradient of {named[id(one)]} at the optimizer step")
                if gradient is not None:
                    stepped[named[id(one)]] = one, gradient
            gradients = [gradient for _, gradient in stepped.values()]
            dense = all(one.layout == torch.strided for one in gradients)
            if not dense or not torch.nn.utils.get_total_norm(gradients).isfinite():
                continue
            chosen = {name: one for name, (one, _) in stepped.items() if name in parameters}
            for part in chunks(chosen, sum(one.nbytes for one in chosen.values()) // _PARTS):
                again = step_again(optimizer, *zip(*(stepped[name] for name in part), strict=True))
                made = _named_as_values(part, again)
                found |= differences(made, {name: theirs.get(name) for name in made}, sized=False)[0]
    except torch.OutOfMemoryError:
        pass
    return found


def _named_as_values(
    parameters: Sequence[str], made: Sequence[tuple[torch.Tensor, Mapping[str, Any]]]
) -> dict[str, torch.Tensor]:
    """Name what `step_again` gave as `values_of` does."""
    found = {}
    for name, (parameter, state) in zip(parameters, made, strict=True):
        found[f"parameter {name}"] = parameter
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"optimizer state of {name}: {key}"] = value
    return found
