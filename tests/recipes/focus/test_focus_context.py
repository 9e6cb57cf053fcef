"""The working context of recipe `focus` and its allocator: what must hold of any text, any scores and any budget."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop.errors import ConfigError
from hotloop.recipes.focus import losses
from hotloop.recipes.focus.allocator import edit, focus
from hotloop.recipes.focus.context import BLOCK, Frame, by_block, fill, lay_out

WIDTH = 4
quick = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def frames(draw):
    blocks = draw(st.integers(2, 9))
    protected = draw(st.integers(1, blocks - 1))
    least = protected * BLOCK + blocks - protected
    return Frame(blocks, least + draw(st.integers(BLOCK - 1, 5 * BLOCK)), protected)


@st.composite
def contexts(draw):
    """Some rows of contexts within the budget, with the scores that a lens may give, ties among them."""
    frame, rows = draw(frames()), draw(st.integers(1, 3))
    far = frame.blocks - frame.protected
    expanded = torch.zeros(rows, frame.blocks, dtype=torch.bool)
    expanded[:, far:] = True
    for row in range(rows):
        for block in draw(st.sets(st.integers(0, far - 1), max_size=frame.room)):
            expanded[row, block] = True
    level = st.sampled_from([-1.0, -0.5, -0.1, 0.0, 0.1, 0.5, 1.0])
    scores = [[draw(level) for _ in range(frame.blocks)] for _ in range(rows)]
    return frame, expanded, torch.tensor(scores)


def filled(frame, expanded):
    """Lay out a text whose tokens are 0, 1, ... and whose gists are -1, -2, ..., as numbers a row; None is empty."""
    layout = lay_out(expanded, frame)
    rows, length = len(expanded), frame.blocks * BLOCK
    tokens = torch.arange(length, dtype=torch.float).view(1, -1, 1).expand(rows, -1, WIDTH)
    gists = -1 - torch.arange(frame.blocks, dtype=torch.float).view(1, -1, 1).expand(rows, -1, WIDTH)
    values = fill(layout, tokens, gists)
    assert values.shape == (rows, frame.budget, WIDTH)
    return [
        [int(value) for value, taken in zip(row, there, strict=True) if taken]
        for row, there in zip(values[..., 0], layout.taken, strict=True)
    ]


def read(frame, expanded):
    """What has to stand there, row by row."""
    return [
        [
            one
            for block, whole in enumerate(row.tolist())
            for one in (range(block * BLOCK, (block + 1) * BLOCK) if whole else [-1 - block])
        ]
        for row in expanded
    ]


@quick
@given(contexts())
def test_a_context_holds_each_block_once_in_the_order_of_the_text(case):
    frame, expanded, _ = case
    assert filled(frame, expanded) == read(frame, expanded)
    assert frame.slots(expanded).tolist() == [len(row) for row in read(frame, expanded)]


@quick
@given(contexts(), st.integers(1, 6))
def test_edits_are_few_stay_within_the_budget_and_leave_protected_blocks_alone(case, most):
    frame, expanded, scores = case
    changed = edit(expanded, scores, frame, most)
    assert (frame.slots(changed) <= frame.budget).all()
    assert changed[:, frame.blocks - frame.protected :].all()
    assert ((changed != expanded).sum(-1) <= 2 * most).all()  # an exchange is two blocks
    assert torch.equal(edit(expanded, scores, frame, most), changed)
    assert filled(frame, changed) == read(frame, changed)


@quick
@given(contexts())
def test_what_is_expanded_has_a_positive_score_and_what_is_collapsed_a_lower_one(case):
    frame, expanded, scores = case
    changed = edit(expanded, scores, frame, 1)
    for row in range(len(expanded)):
        came = scores[row][changed[row] & ~expanded[row]]
        went = scores[row][expanded[row] & ~changed[row]]
        assert (came > 0).all()
        assert (went < came.max() if len(came) else went < 0).all()


@quick
@given(contexts(), st.integers(1, 4), st.integers(1, 3))
def test_the_allocator_does_what_each_round_asks_for_and_after_one_that_asks_for_nothing_nothing(case, rounds, edits):
    frame, expanded, scores = case
    seen = [expanded]

    def look(expanded):
        assert torch.equal(expanded, seen[-1])
        seen.append(edit(expanded, scores, frame, edits))
        return scores, seen[-1]

    found = focus(look, expanded, rounds)
    assert (len(found.scores), len(seen)) == (rounds, rounds + 1)
    assert torch.equal(found.expanded, seen[-1])
    assert (frame.slots(found.expanded) <= frame.budget).all()
    changes = [(after != before).sum(-1) for before, after in itertools.pairwise(seen)]
    assert torch.equal(found.edits, sum(changes))
    assert (found.edits <= 2 * edits * rounds).all()
    for row in range(len(expanded)):
        still = [int(change[row]) == 0 for change in changes]
        assert still == sorted(still)


@quick
@given(contexts())
def test_a_blocks_score_is_the_mean_of_its_slots_and_that_of_a_protected_one_is_nothing(case):
    frame, expanded, scores = case
    layout = lay_out(expanded, frame)
    found = by_block(scores.gather(1, layout.block), layout, frame.blocks)
    far = frame.blocks - frame.protected
    assert torch.allclose(found[:, :far], scores[:, :far], atol=1e-6)
    assert (found[:, far:] == 0).all()


@quick
@given(frames(), st.integers(0, 3))
def test_contexts_to_compare_with_take_the_same_slots(frame, seed):
    torch.manual_seed(seed)
    first, second, third = frame.newest(3), frame.drawn(3), frame.exchanged(3)
    for one in (first, second, third):
        assert (one.sum(-1) == frame.protected + frame.room).all()
        assert one[:, frame.blocks - frame.protected :].all()
    assert ((first != third).sum(-1) <= 2).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 200, 4), r"focus\.protected=4: expected fewer than focus\.blocks=4"),
        ((4, 60, 1), r"focus\.budget=60: expected at least 66"),
    ],
)
def test_sizes_that_leave_nothing_to_choose_are_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        Frame(*sizes)


def test_the_preference_loss_teaches_which_block_helps():
    scores = torch.zeros(1, 1, 4, requires_grad=True)
    expanded = torch.tensor([[[True, False, False, True], [False, True, False, True], [False, False, True, True]]])
    helped = torch.tensor([[2.0, 1.0, 3.0]])  # the second block helps, the third does harm
    for _ in range(50):
        worth = losses.utilities(scores.expand(1, 3, 4), expanded)
        loss, agreement = losses.preference(worth, helped)
        (gradient,) = torch.autograd.grad(loss, scores)
        scores = (scores - gradient).detach().requires_grad_()
    order = scores[0, 0, :3].argsort().tolist()
    assert (order, float(agreement), float(scores.detach()[0, 0, 3])) == ([2, 0, 1], 1.0, 0.0)
