"""The allocator: asks the lens again and again which edits of a working context are best, and does the best few."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from hotloop.compiling.control import own

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hotloop.recipes.focus.context import Frame


@dataclasses.dataclass(frozen=True)
class Focused:
    """What the allocator came to: a working context of each row, and how it got there.

    Args:
        expanded: (rows, blocks).
        scores: of each slot, one (rows, budget) a round, as the lens gave them for the context of that round.
        edits: of each row, shape (rows,).
    """

    expanded: Tensor
    scores: tuple[Tensor, ...]
    edits: Tensor


def edit(expanded: Tensor, scores: Tensor, frame: Frame, most: int) -> Tensor:
    """Do the best few edits of each row, one after another; gives the new contexts.

    An edit expands a block whose score is positive, collapses one whose score is negative, or, where the budget is
    spent, does both at once if the one to expand has the higher score. The best is what the scores ask for most. A
    block is edited once, a protected one never. The first of equals is taken, so that the outcome is always the same.

    Args:
        expanded: (rows, blocks), within the budget.
        scores: (rows, blocks).
        frame: the sizes.
        most: edits of a row.
    """
    numbers = torch.arange(frame.blocks, device=expanded.device)
    # What each edit is worth, (2, rows, blocks): to expand a block, and to collapse it. What may not be is worth -inf.
    worth = torch.stack([scores, -scores]).masked_fill(numbers >= frame.blocks - frame.protected, -torch.inf)
    for _ in range(most):
        done = torch.stack([expanded, ~expanded])
        best, block = worth.masked_fill(done, -torch.inf).max(-1)
        coming, going = best
        full = expanded.sum(-1) >= frame.most
        # Where the budget is spent, only both at once: if that is worth anything, and more than to collapse alone.
        better = torch.where(full, coming + going > going.clamp(min=0), coming >= going)
        expands = better & (coming > 0)
        collapses = torch.where(expands, full, going > 0)
        changed = ((numbers == block.unsqueeze(-1)) & torch.stack([expands, collapses]).unsqueeze(-1)).any(0)
        expanded = expanded ^ changed
        worth = worth.masked_fill(changed, -torch.inf)
    return expanded


def focus(look: Callable[[Tensor], tuple[Tensor, Tensor]], expanded: Tensor, rounds: int) -> Focused:
    """Edit working contexts round by round.

    Once no edit is asked for, the rounds that are left change nothing. Nobody asks whether that is so: a GPU would have
    to be waited for in each round, and nearly always it is not.

    Args:
        look: one round: gives the score of each slot of contexts, (rows, budget), and what they are after their edits.
            It may be compiled with CUDA graphs: what is kept of it goes through `hotloop.own`.
        expanded: where to begin, (rows, blocks).
        rounds: so many.
    """
    kept, contexts = [], [expanded]
    for _ in range(rounds):
        scores, expanded = own(look(expanded))
        kept.append(scores)
        contexts.append(expanded)
    seen = torch.stack(contexts)
    return Focused(expanded, tuple(kept), (seen[1:] != seen[:-1]).sum((0, 2)))
