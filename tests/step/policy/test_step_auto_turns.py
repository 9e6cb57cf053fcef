"""The turns of a trial: each step of one runs in the tier that its time is counted for."""

import torch

import hotloop
from hotloop.decide import Decision
from hotloop.step.loop.runner import StepRunner
from hotloop.step.policy import auto
from hotloop.testing import captured_step_emulation


def test_a_trial_of_a_tier_that_stands_ready_begins_with_the_step_at_hand(monkeypatch):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    turns = []
    plain = StepRunner.run

    def run(self, args, kwargs, tier):
        if (trial_and_turn := loop.policy.turn()) is not None:
            turns.append((tier.name, trial_and_turn[1].tier))
        return plain(self, args, kwargs, tier)

    def decide(standing, options):
        return Decision(action="try", tier="eager+graph", reason="planted", numbers={}, ask_again_in_steps=1)

    monkeypatch.setattr(StepRunner, "run", run)
    monkeypatch.setattr(auto, "decide", decide)
    with captured_step_emulation(), hotloop.Loop(model, optimizer) as loop:
        loop.policy.candidates.proven.add("eager+graph")

        @loop.step
        def train_step(x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(14):
            train_step(torch.ones(2, 4))
    assert [ran for ran, _ in turns[:4]] == ["eager", "eager+graph", "eager+graph", "eager"]
    assert all(ran == counted for ran, counted in turns)
