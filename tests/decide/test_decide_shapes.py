"""What to do about the shapes of a run's batches, from how often each was seen."""

import pytest

from hotloop.decide import odd_pays, plan_shapes


def pairs(rows, length=None):
    """The shapes of a batch: inputs with a length, if any, and labels."""
    return ((rows, 8) if length is None else (rows, length), (rows,))


def test_one_shape_is_static():
    plan = plan_shapes({pairs(32): 64})
    assert (plan.choice, plan.dynamic, plan.own_code) == ("static", (), False)
    assert plan.common == {pairs(32)}


def test_a_short_last_batch_is_odd_and_changes_nothing_else():
    plan = plan_shapes({pairs(32): 63, pairs(7): 1})
    assert plan.choice == "odd batches eager"
    assert plan.common == {pairs(32)}
    assert plan.dynamic == ()
    assert "1 of 64 batches looked at are not of the usual size 32" in plan.reason


def test_a_last_batch_of_short_epochs_is_worth_its_code():
    assert plan_shapes({pairs(32): 3, pairs(7): 1}).common == {pairs(32), pairs(7)}


def test_batch_sizes_alone_never_make_a_plan_dynamic():
    plan = plan_shapes({pairs(rows): 1 for rows in range(1, 30)})
    assert plan.choice != "dynamic"
    assert not plan.own_code


def test_many_lengths_are_one_dynamic_code():
    plan = plan_shapes({pairs(4, length): 1 for length in range(10, 40)})
    assert (plan.choice, plan.dynamic) == ("dynamic", ((0, 1),))


def test_a_few_frequent_lengths_have_code_of_their_own():
    plan = plan_shapes({pairs(4, 64): 30, pairs(4, 128): 33, pairs(3, 128): 1})
    assert plan.own_code
    assert plan.choice == "odd batches eager"
    assert plan.common == {pairs(4, 64), pairs(4, 128)}


def test_five_lengths_are_too_many_for_that():
    assert plan_shapes({pairs(4, 16 * n): 10 for n in range(1, 6)}).choice == "dynamic"


def test_lengths_of_which_few_recur_are_dynamic():
    seen = {pairs(4, 64): 32} | {pairs(4, 65 + n): 1 for n in range(32)}
    assert plan_shapes(seen).choice == "dynamic"


def test_a_dimension_0_of_its_own_is_a_length():
    """Packed rows, beside one label a sequence."""
    plan = plan_shapes({((4,), (rows, 8)): 1 for rows in range(20, 30)})
    assert plan.dynamic == ((1, 0),)


def test_other_arguments_from_batch_to_batch_say_nothing_of_lengths():
    plan = plan_shapes({((4, 8),): 32, ((4, 8), (4,)): 32})
    assert (plan.choice, plan.dynamic) == ("static", ())


@pytest.mark.parametrize(("share", "left", "pays"), [(0.01, 1_000, False), (0.01, 100_000, True), (0.5, 4_000, True)])
def test_an_odd_shape_pays_by_what_is_left_of_it(share, left, pays):
    assert odd_pays(share, left, saving=0.01, compile_seconds=8.0) is pays


def test_where_compiled_code_is_no_faster_no_odd_shape_pays():
    assert not odd_pays(0.5, 10**9, saving=-0.001, compile_seconds=1.0)


def test_sizes_that_were_chosen_beforehand_have_code_each_up_to_eight():
    many = {pairs(4, 16 * n): 1 if n == 1 else 50 for n in range(1, 9)}
    plan = plan_shapes(many, declared=8)
    assert (plan.choice, plan.own_code, plan.common) == ("static", True, frozenset(many))
    assert plan_shapes({**many, pairs(4, 1024): 1}, declared=9).choice == "dynamic"
    assert plan_shapes(many, declared=7).choice == "dynamic", "more came than were declared"
