"""What is learnt: to predict what follows, and to prefer the working context that predicted it better."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SHARPNESS = 4.0
"""How much a preference grows with a score: scores are from -1 to 1, and odds of e ** 1 would never be certain."""


def utilities(scores: Tensor, expanded: Tensor) -> Tensor:
    """Return what a lens, looking at each context of a text, makes of every context of it.

    The edits that lead from one context to another are worth the scores of what they expand, less those of what they
    collapse. Of that, what depends on the context that is looked at is left out: it is the same for all.

    Args:
        scores: of each block, as each context shows it: (texts, contexts, blocks).
        expanded: (texts, contexts, blocks).

    Returns:
        (texts, contexts looked at, contexts judged).
    """
    return SHARPNESS * scores @ expanded.to(scores.dtype).transpose(1, 2)


def preference(worth: Tensor, losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of preferences between contexts of one text, and how often the lens agrees with what came out.

    Bradley and Terry (Rank analysis of incomplete block designs, Biometrika 39, 1952): i is preferred to j with the
    probability sigmoid(worth of i - worth of j). Each pair counts by how far apart its two losses are, since two
    contexts that predict alike tell nothing.

    Args:
        worth: as `utilities` gives it.
        losses: what each context led to, (texts, contexts); no gradient goes through them.

    Returns:
        the loss, and the agreement from 0 to 1 weighted alike; scalars.
    """
    gap = (losses.unsqueeze(1) - losses.unsqueeze(2)).detach().unsqueeze(1)  # [i, j] > 0 where i predicted better
    margin = worth.unsqueeze(3) - worth.unsqueeze(2)
    weight = gap.clamp(min=0)
    weight = weight / weight.sum().clamp(min=torch.finfo(weight.dtype).tiny) / worth.shape[1]
    loss = -(functional.logsigmoid(margin) * weight).sum()
    return loss, ((margin > 0) * weight).sum().detach()
