"""Checks of libraries that only decide whether to raise: recorded steps leave them out, eager runs make them."""

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.distributions import Categorical, Distribution, Normal
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def _checking():
    """By default distributions check, until dynamo is loaded, which turns that off in the whole process."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


class Agent(nn.Module):
    """Actor and critic as in cleanrl's PPO."""

    def __init__(self, continuous):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        self.log_std = nn.Parameter(torch.zeros(1, 3)) if continuous else None

    def get_action_and_value(self, x, action):
        mean = self.actor(x)
        if self.log_std is None:
            chosen = Categorical(logits=mean)
            return chosen.log_prob(action), chosen.entropy(), self.critic(x)
        chosen = Normal(mean, torch.exp(self.log_std.expand_as(mean)))
        return chosen.log_prob(action).sum(1), chosen.entropy().sum(1), self.critic(x)


def minibatches(device, steps=20, *, continuous):
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        action = torch.randn(6, 3, generator=draws) if continuous else torch.randint(3, (6,), generator=draws)
        floats = [torch.randn(6, generator=draws) for _ in range(3)]
        yield [one.to(device) for one in (torch.randn(6, 8, generator=draws), action, *floats)]


def ppo(*, continuous):
    """Return a program whose distributions check their arguments."""

    def program(run):
        agent = Agent(continuous).to(run.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=2**-8, eps=1e-5, fused=True)

        @run.loop(agent, optimizer).step
        def train_step(x, action, old_log_prob, advantage, returned):
            log_prob, entropy, value = agent.get_action_and_value(x, action)
            ratio = (log_prob - old_log_prob).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = policy - 0.01 * entropy.mean() + 0.5 * 0.5 * (value.view(-1) - returned).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            return loss, (ratio - 1).abs().gt(0.2).float().mean()

        for minibatch in minibatches(run.device, continuous=continuous):
            run.note(*train_step(*minibatch))
        return agent, optimizer

    return program


@pytest.mark.parametrize("continuous", [False, True])
def test_a_ppo_update_is_captured_whole_and_its_distributions_check_outside_of_it(both, continuous):
    both.equal(ppo(continuous=continuous), exact=True)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Normal(torch.tensor(0.0), torch.tensor(-1.0))


def test_a_condition_on_a_tensor_that_transformers_checks_is_left_out(both):
    from transformers.utils import torch_compilable_check

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            torch_compilable_check(x.isfinite().all(), "not finite")
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program, exact=True)


def test_by_default_a_check_that_the_program_asks_for_is_kept(both):
    """Whoever passes ``error_if_nonfinite`` may count on the error before the optimizer steps."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.declines(program, reason="read on the host", hint="error_if_nonfinite=False")
