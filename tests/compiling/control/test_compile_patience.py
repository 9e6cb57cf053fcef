"""Collectives wait an hour while components have their first steps before them: then the timeouts are the user's."""

import datetime as dt

import pytest
import torch
from compiling_models import Net, rows, train
from torch import distributed as dist

import hotloop
from hotloop._torch import collectives

OWN = dt.timedelta(seconds=40)
HOUR = dt.timedelta(hours=1)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1, timeout=OWN)
    yield dist.group.WORLD
    dist.destroy_process_group()
    collectives.patience.drop("the first steps of compiled code")


def test_a_compile_is_given_an_hour_until_its_first_steps_are_over(group):
    assert collectives.timeout_of(group) == OWN
    model = hotloop.compile(Net(), "aot_eager")
    assert collectives.timeout_of(group) == HOUR
    train(model, [rows()] * 3)
    assert collectives.timeout_of(group) == HOUR
    train(model, [rows()])
    assert collectives.timeout_of(group) == OWN
    with torch.no_grad():  # the code of evaluations is compiled later
        model(rows())
    assert collectives.timeout_of(group) == HOUR
    train(model, [rows()] * 4)
    assert collectives.timeout_of(group) == OWN


def test_a_group_that_is_made_after_the_compile_is_given_it_at_the_first_call(tmp_path):
    model = hotloop.compile(Net(), "aot_eager")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1, timeout=OWN)
    try:
        model(rows())
        assert collectives.timeout_of(dist.group.WORLD) == HOUR
        train(model, [rows()] * 4)
        assert collectives.timeout_of(dist.group.WORLD) == OWN
    finally:
        dist.destroy_process_group()


def test_votes_wait_no_longer_than_before(group):
    """A process that is lost would be noticed after an hour."""
    votes = dist.new_group(backend="gloo", timeout=OWN, group_desc=collectives.VOTES)
    with collectives.patience.held("a loop"):
        assert collectives.timeout_of(group) == HOUR
        assert collectives.timeout_of(votes) == OWN
    assert collectives.timeout_of(votes) == OWN
