"""A decorated step that is called in another one: a part of it, like any function."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, Classifier, batches
from torch.nn import functional as F


def one_in_another(several, fail_at=None):
    """A program with a step in a step, of one loop or of two; also one that is called on its own in between."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        loop = run.loop(model, optimizer)
        other = run.loop(model, optimizer) if several else loop
        decorate = other.owner.step if run.owned else lambda function: function

        @decorate
        def inner(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        @loop.step
        def train_step(x, y):
            loss = inner(x, y)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device)):
            if number == fail_at:
                with pytest.raises(ValueError, match="batch"):
                    train_step(x, y[1:])
            run.note(train_step(x, y))
        run.note(inner(x, y))
        return model, optimizer

    return program


@pytest.mark.parametrize("fail_at", [None, 9])
@pytest.mark.parametrize("several", [False, True])
def test_a_step_in_another_is_a_part_of_it(both, several, fail_at):
    run = both.alike(one_in_another(several, fail_at), exact=True)
    assert not run.declined
    assert run.status().tier == GRAPH
    assert run.replays() == 14
    assert [one.step for one in run.statuses] == ([20, 1] if several else [21])


@pytest.mark.parametrize("fail_at", [None, 9])
@pytest.mark.parametrize("several", [False, True])
def test_steps_are_counted_alike_however_they_run(both, several, fail_at):
    asked = "eager", GRAPH, "aot_eager"
    runs = [both.run(one_in_another(several, fail_at), each)[0] for each in asked]
    counts = [[one.step for one in run.statuses] for run in runs]
    taken = [[sum(tier.steps for tier in one.tiers) for one in run.statuses] for run in runs]
    assert counts == taken == 3 * [[20, 1] if several else [21]]
