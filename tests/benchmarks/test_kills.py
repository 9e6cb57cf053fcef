"""`benchmarks.kills` compares a run that was killed with the same undisturbed: what is lost, twice or other is counted."""

from collections import Counter

import pytest
import torch

from benchmarks.kills_runs import compare_runs, same
from hotloop import record
from hotloop.train import checkpoint

LOSSES = [(1, 0.5), (2, 0.4), (3, 0.3)]


def a_run(folder, steps=LOSSES, accuracy=0.9, weight=1.0, best=True):
    with record.RunRecord(folder) as run:
        for step, loss in steps:
            run.append("steps", {"step": step, "loss": loss, "learning_rate": 0.1})
        run.append("metrics", {"step": 3, "accuracy": accuracy})
    model = {"model": {"weight": torch.tensor([weight])}}
    for name in (checkpoint.LAST, checkpoint.BEST)[: 1 + best]:
        settings = {"recipe": {"name": "focus"}, "folder": str(folder)}
        document = {"model": model, "others": {"seed": 1}, "settings": settings, "position": {}}
        checkpoint.save(folder / "checkpoints" / name, document)
    return folder


def compared(tmp_path, **other):
    found = Counter()
    compare_runs(a_run(tmp_path / "killed", **other), a_run(tmp_path / "undisturbed"), found)
    return found


def test_two_runs_that_are_alike_are_counted_so(tmp_path):
    found = compared(tmp_path)
    assert found["steps"] == 3
    assert (found["checkpoints"], found["checkpoints_equal"], found["weights_equal"]) == (2, 2, 2)
    wrong = ("steps_missing", "steps_twice", "steps_of_another_loss_or_rate", "validations_not_as_undisturbed")
    assert [found[name] for name in wrong] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"steps": LOSSES[:2]}, {"steps_missing": 1}),
        ({"steps": [*LOSSES, LOSSES[2]]}, {"steps_twice": 1}),
        ({"steps": [*LOSSES[:2], (3, 0.30000000000000004)]}, {"steps_of_another_loss_or_rate": 1}),
        ({"accuracy": 0.8}, {"validations_not_as_undisturbed": 1}),
        ({"weight": 1.0000001}, {"checkpoints_equal": 0, "weights_equal": 0}),
        ({"best": False}, {"checkpoints": 2, "checkpoints_equal": 1}),
    ],
)
def test_what_is_lost_twice_or_other_is_counted(tmp_path, other, expected):
    found = compared(tmp_path, **other)
    assert {name: found[name] for name in expected} == expected


def test_tensors_are_compared_by_their_bits():
    assert same({"a": [torch.tensor([float("nan")])]}, {"a": [torch.tensor([float("nan")])]})
    assert not same(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64))
    assert not same({"a": 1}, {"a": 1, "b": 2})
    assert not same([1], [True])
