"""The allocator: asks the lens again and again which edits of a working context are best, and does the best few."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

import hotloop
from hotloop.train.focus.context import BLOCK, by_block, lay_out

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from hotloop.train.focus.context import Frame, Layout


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
    far = torch.arange(frame.blocks, device=expanded.device) < frame.blocks - frame.protected
    free = far.expand_as(expanded).clone()
    nothing = scores.new_full((), -torch.inf)
    for _ in range(most):
        worth_in, coming = torch.where(free & ~expanded, scores, nothing).max(-1)
        worth_out, going = torch.where(free & expanded, -scores, nothing).max(-1)
        fits = frame.slots(expanded) + BLOCK - 1 <= frame.budget
        wants = worth_in > 0
        values = torch.stack(
            [
                torch.where(fits & wants, worth_in, nothing),
                torch.where(worth_out > 0, worth_out, nothing),
                torch.where(~fits & wants & (worth_in + worth_out > 0), worth_in + worth_out, nothing),
            ]
        )
        value, kind = values.max(0)
        does = value > nothing
        expands = (does & (kind != 1)).unsqueeze(-1) & _one(coming, frame.blocks)
        collapses = (does & (kind != 0)).unsqueeze(-1) & _one(going, frame.blocks)
        expanded = (expanded | expands) & ~collapses
        free = free & ~expands & ~collapses
    return expanded


def _one(block: Tensor, blocks: int) -> Tensor:
    return torch.arange(blocks, device=block.device) == block.unsqueeze(-1)


def focus(score: Callable[[Layout], Tensor], expanded: Tensor, frame: Frame, *, rounds: int, edits: int) -> Focused:
    """Edit working contexts round by round, until no edit is asked for.

    Args:
        score: gives the score of each slot of contexts that are laid out, (rows, budget). It may be compiled with CUDA
            graphs: what is kept of it goes through `hotloop.own`.
        expanded: where to begin, (rows, blocks).
        frame: the sizes.
        rounds: at most so many.
        edits: of a row in a round.
    """
    kept, done = [], torch.zeros(expanded.shape[0], dtype=torch.long, device=expanded.device)
    for _ in range(rounds):
        layout = lay_out(expanded, frame)
        scores = hotloop.own(score(layout))
        kept.append(scores)
        changed = edit(expanded, by_block(scores.float(), layout, frame.blocks), frame, edits)
        done = done + (changed != expanded).sum(-1)
        still, expanded = bool((changed == expanded).all()), changed
        if still:
            break
    return Focused(expanded, tuple(kept), done)
