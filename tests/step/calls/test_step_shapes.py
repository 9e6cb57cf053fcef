"""Batches of several shapes, and buckets that make few shapes of many."""

from __future__ import annotations

import array
import logging

import pytest
import torch
from step_programs import GRAPH, PROVING, Classifier, Writer, batches, plain_step, sentences
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.loop import capturing
from hotloop.step.loop.kinds import REPLACES


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def sgd(model):
    """Padded sums are rounded otherwise, which Adam makes much of where a gradient is zero but for that."""
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5, fused=True)


def of_sizes(sizes):
    """A program whose batches have these sizes, one after the other."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for number, size in enumerate(sizes):
            ((x, y),) = batches(run.device, 1, size=size, seed=number)
            run.note(train_step(x, y))
        return model, optimizer

    return program


def test_a_ragged_last_batch_runs_without_a_graph_and_the_captured_step_stays(both):
    run = both.equal(of_sizes([6] * 10 + [3] + [6] * 12), exact=True)
    assert run.calls() == PROVING + 1
    assert run.dropped == []


def test_a_second_shape_that_comes_again_gets_a_recording_of_its_own(both):
    run = both.equal(of_sizes([6, 6, 3] * 20), exact=True, replays=40)
    assert run.calls() == 2 * PROVING
    assert run.dropped == []


def test_at_most_eight_shapes_are_captured(both):
    run = both.alike(of_sizes(list(range(2, 12)) * 10), exact=True)
    assert run.status().tier == "eager+graph"  # in force for eight sizes, though the last call's is one too many
    assert run.replays() == 8 * (10 - 6)
    assert run.calls() == 8 * PROVING + 2 * 10


def test_a_further_shape_takes_the_place_of_the_one_that_came_longest_ago(both, monkeypatch):
    """A curriculum: each of four sizes comes 24 times, and never again."""
    monkeypatch.setattr(capturing, "KINDS", 2)
    run = both.alike(of_sizes([size for size in range(3, 7) for _ in range(24)]), exact=True)
    assert run.status().tier == "eager+graph"
    assert run.replays() == 2 * (24 - 6) + 2 * (24 - 6 - (REPLACES - 2))  # 2 calls are eager in any case
    assert not run.declined


def lengths(number):
    return (3, 5, 8, 6, 2, 7)[number % 6]


def padded(run, train_step, steps=48):
    """Call a step with sentences of varying length."""
    for number in range(steps):
        (ids,) = sentences(run.device, 1, length=lengths(number), seed=number)
        run.note(train_step(ids))


BUCKETS = {"ids": hotloop.Pad(dim=1, value=-1, to=(4, 8))}


def language_model(model, optimizer):
    def train_step(ids):
        known = ids >= 0
        logits = model(ids.clamp(min=0)[:, :-1])
        target = torch.where(known, ids, -100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


@pytest.mark.parametrize("asked", ["eager", GRAPH])
def test_buckets_make_two_shapes_of_six(both, asked):
    """Padding is eager's too: what the padded places hold is masked by the program, so losses agree without any."""
    shapes = array.array("b")  # a list that the step fills would be state of its own

    def program(run):
        model = Writer().to(run.device)
        optimizer = sgd(model)
        step, note = language_model(model, optimizer), (shapes if run.owned else array.array("b")).append

        def train_step(ids):
            note(ids.shape[1])
            return step(ids)

        padded(run, run.loop(model, optimizer, buckets=BUCKETS).step(train_step))
        return model, optimizer

    run = both.alike(program, asked=asked)
    assert set(shapes) == {4, 8}
    if asked == GRAPH:
        assert run.calls() == 2 * PROVING
        assert run.replays() == 48 - 2 * 6


def test_buckets_name_a_key_of_a_batch_and_leave_the_users_own_alone(both):
    def program(run):
        model = Writer().to(run.device)
        optimizer = sgd(model)
        step, sizes = language_model(model, optimizer), (4, 8) if run.owned else range(10)

        def train_step(batch, *, scale):
            assert batch["ids"].shape[1] in sizes
            return step(batch["ids"])

        train_step = run.loop(model, optimizer, buckets=BUCKETS).step(train_step)
        for number in range(48):
            (ids,) = sentences(run.device, 1, length=lengths(number), seed=number)
            batch = {"ids": ids, "name": "batch"}
            run.note(train_step(batch, scale=1.0))
            assert batch["ids"] is ids
        return model, optimizer

    assert both.alike(program).replays() == 48 - 2 * 6


def test_a_size_above_the_largest_bucket_stays_as_it_is_and_is_told_once(both, caplog):
    def program(run):
        model = Writer().to(run.device)
        optimizer = sgd(model)
        train_step = run.loop(model, optimizer, buckets={"ids": hotloop.Pad(dim=-1, value=-1, to=(4,))}).step(
            language_model(model, optimizer)
        )
        padded(run, train_step, steps=12)
        return model, optimizer

    with caplog.at_level(logging.WARNING, "hotloop"):
        both.alike(program)
    told = [one.message for one in caplog.records if "more than the largest bucket 4" in one.message]
    assert len(told) == 1


def looped(device, **buckets):
    model = Writer().to(device)
    optimizer = adamw(model)
    loop = hotloop.Loop(model, optimizer, run=GRAPH, buckets=buckets)
    return loop.step(language_model(model, optimizer))


def test_a_bucket_of_no_argument_is_refused_at_the_first_step(device):
    train_step = looped(device, idx=hotloop.Pad(dim=1, value=0, to=(8,)))
    with pytest.raises(ConfigError, match=r"buckets names idx: no such argument in train_step\(ids\)"):
        train_step(next(sentences(device)))


def test_a_bucket_of_something_else_than_a_tensor_is_refused(device):
    train_step = looped(device, ids=hotloop.Pad(dim=1, value=0, to=(8,)))
    with pytest.raises(ConfigError, match=r"buckets\['ids'\]: the argument is a list"):
        train_step([[1, 2, 3]])


def test_a_bucket_of_a_dimension_that_is_not_there_is_refused(device):
    train_step = looped(device, ids=hotloop.Pad(dim=2, value=0, to=(8,)))
    with pytest.raises(ConfigError, match=r"dim 2 does not exist in shape \(3, 5\)"):
        train_step(next(sentences(device)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": "1", "value": 0, "to": (8,)}, "dim '1'"),
        ({"dim": 1, "value": None, "to": (8,)}, "value None"),
        ({"dim": 1, "value": True, "to": (8,)}, "value True"),
        ({"dim": 1, "value": 0, "to": ()}, r"to \(\)"),
        ({"dim": 1, "value": 0, "to": (0, 8)}, r"to \(0, 8\)"),
        ({"dim": 1, "value": 0, "to": (8.5,)}, "expected sizes"),
        ({"dim": 1, "value": 0, "to": 8}, "expected sizes"),
    ],
)
def test_a_pad_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        hotloop.Pad(**settings)


@pytest.mark.parametrize("buckets", [{"ids": 8}, [("ids", 8)], "ids"])
def test_buckets_that_are_no_mapping_of_pads_are_refused(buckets):
    model = Writer()
    with pytest.raises(ConfigError, match="buckets"):
        hotloop.Loop(model, adamw(model), run="eager", buckets=buckets)
