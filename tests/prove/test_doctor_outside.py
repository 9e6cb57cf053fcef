"""What a step pays outside of its model: the wait for its batch, and optimizers that are not fused."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotloop import diagnose
from hotloop.prove.doctor.outside import data_wait, fused_optimizers
from hotloop.step import Workload


class Slow(Dataset):
    """Rows that take a while to make."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        threading.Event().wait(0.004)
        return torch.zeros(4)


def workload(batches, optimizer=None):
    model = nn.Linear(4, 4)
    made = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)

    def step(x):
        model(x).sum().backward()
        made.step()
        made.zero_grad()

    return Workload(model, made, step, batches)


def waited(program):
    return data_wait(program, program.endless(), program.run, 6)


def test_a_loader_that_is_slower_than_the_step_is_told_with_its_workers():
    found = waited(workload(DataLoader(Slow(), batch_size=4)))
    assert found["data_wait_ms"] >= 16
    assert found["data_workers"] == 0
    assert found["data_step_ms"] > 0
    (advice,) = diagnose.diagnose({"measurements": found | {"data_step_ms": 1.0}})
    assert advice.rule == "data_wait"
    assert "the training's own process" in advice.what
    assert "num_workers" in advice.change


def test_what_prepares_a_batch_before_its_step_counts():
    program = workload([torch.zeros(2, 4)])
    program = Workload(program.model, program.optimizer, program.step, program.batches, before=Slow().__getitem__)
    assert waited(program)["data_wait_ms"] >= 4


@pytest.mark.parametrize("batches", [[torch.zeros(2, 4)], iter([torch.zeros(2, 4)])])
def test_nobody_waits_for_a_list_and_an_iterator_is_not_used_up(batches):
    program = workload(batches)
    assert waited(program) == {}
    assert next(program.endless()).shape == (2, 4)


def test_optimizers_with_a_fused_form_are_timed_on_copies():
    program = workload([torch.zeros(2, 4)], torch.optim.AdamW)
    program.run(torch.ones(2, 4))
    before = copy.deepcopy((program.model.state_dict(), program.optimizer.state_dict()))
    (found,) = fused_optimizers(program, lambda: None)
    assert found["name"] == "AdamW"
    for name in ("step_ms", "fused_step_ms"):
        assert 0 < found[f"{name}_low"] <= found[name] <= found[f"{name}_high"]
    after = program.model.state_dict(), program.optimizer.state_dict()
    torch.testing.assert_close(after, before, rtol=0, atol=0)


class Own(torch.optim.SGD):
    """An optimizer of the program's own, which may do anything."""


@pytest.mark.parametrize(
    "optimizer",
    [lambda *args, **settings: torch.optim.AdamW(*args, **settings, fused=True), torch.optim.Rprop, Own],
    ids=["fused already", "without a fused form", "of the program's own"],
)
def test_other_optimizers_are_left_alone(optimizer):
    assert fused_optimizers(workload([torch.zeros(2, 4)], optimizer), lambda: None) == []


def test_parameters_that_torch_fuses_no_step_for_are_left_alone():
    model = nn.Linear(4, 4, dtype=torch.complex64)
    optimizer = torch.optim.AdamW(model.parameters())
    assert fused_optimizers(Workload(model, optimizer, lambda _: None, [1]), lambda: None) == []
