"""The programs of the campaign of false declines: how many there are, and that one of each structure's first network runs."""

import collections

import false_declines
import pytest
import small_networks
import small_programs


def test_there_are_two_hundred_and_each_optimizer_and_precision_is_dealt():
    found = small_programs.programs()
    assert len(found) == 200
    assert {parts[2] for parts in found.values()} == set(small_networks.OPTIMIZERS)
    counts = collections.Counter(parts[3] for parts in found.values())
    assert set(counts) == set(small_networks.PRECISIONS)
    assert min(counts.values()) > 20


@pytest.mark.parametrize("structure", ["classify", "accumulated", "gan"])
def test_a_right_program_is_captured(structure):
    name = next(name for name in small_programs.programs() if name.startswith(f"{structure}/mlp/"))
    assert false_declines.train(small_programs.programs()[name], 0, "eager+graph") == ""


def test_a_program_that_cannot_be_captured_counts_as_declined(monkeypatch):
    def reads(program):
        model, optimizer, step, batch = small_programs.STRUCTURES["classify"](program)
        return model, optimizer, lambda *args: step(*args) * float(step(*args).detach()), batch

    monkeypatch.setitem(false_declines.STRUCTURES, "reads", reads)
    assert "read on the host" in false_declines.train(("reads", "mlp", "sgd", "float32"), 0, "eager+graph")
