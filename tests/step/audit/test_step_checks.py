"""Checks of libraries that only decide whether to raise: recorded steps leave them out, eager runs make them."""

import contextlib
import logging
import threading

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from hotloop._torch import checks

CHECKED = {"validate_args": True}
"""By default distributions check, until dynamo is loaded, which turns that off in the whole process."""


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
            chosen = Categorical(logits=mean, **CHECKED)
            return chosen.log_prob(action), chosen.entropy(), self.critic(x)
        chosen = Normal(mean, torch.exp(self.log_std.expand_as(mean)), **CHECKED)
        return chosen.log_prob(action).sum(1), chosen.entropy().sum(1), self.critic(x)


def minibatches(device, steps=20, *, continuous):
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        action = torch.randn(6, 3, generator=draws) if continuous else torch.randint(3, (6,), generator=draws)
        floats = [torch.randn(6, generator=draws) for _ in range(3)]
        yield [one.to(device) for one in (torch.randn(6, 8, generator=draws), action, *floats)]


def ppo(*, continuous, around=contextlib.nullcontext, **settings):
    """Return a program whose distributions check their arguments, in a context that ``around`` makes."""

    def program(run):
        agent = Agent(continuous).to(run.device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=2**-8, eps=1e-5, fused=True)

        @run.loop(agent, optimizer, **settings).step
        def train_step(x, action, old_log_prob, advantage, returned):
            with around():
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
def test_a_ppo_update_is_captured_whole_and_its_checks_are_said_once(both, continuous, caplog):
    with caplog.at_level(logging.WARNING, "hotloop"):
        both.equal(ppo(continuous=continuous), exact=True)
    said = [one.getMessage() for one in caplog.records if "torch/distributions/" in one.getMessage()]
    assert len(said) == 1, said
    assert f"chosen = {'Normal' if continuous else 'Categorical'}(" in said[0]
    assert "chosen.log_prob(action)" in said[0]


def test_no_other_context_around_a_check_counts_for_a_try(both):
    both.equal(ppo(continuous=False, around=lambda: torch.autograd.profiler.record_function("policy")), exact=True)


def tried(where):
    """A program that leaves spoilt batches out: their parameters raise, and it catches that."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        def trained(x, y):
            loss = -Categorical(logits=model(x), **CHECKED).log_prob(y).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def suppressed(x, y):
            with contextlib.suppress(ValueError):
                return trained(x, y)
            return torch.zeros((), device=x.device)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            if where == "around the step":
                return trained(x, y)
            if where == "in suppress":
                return suppressed(x, y)
            try:
                return trained(x, y)
            except ValueError:
                return torch.zeros((), device=x.device)

        program.caught = 0
        for number, (x, y) in enumerate(batches(run.device, 20)):
            batch = x.fill_(float("nan")) if number == 12 else x, y
            if where != "around the step":
                run.note(train_step(*batch))
                continue
            try:
                run.note(train_step(*batch))
            except ValueError:
                program.caught += 1
        return model, optimizer

    return program


@pytest.mark.parametrize("where", ["in try", "in suppress", "around the step"])
def test_a_program_that_catches_what_a_check_raises_keeps_its_checks(both, where):
    program = tried(where)
    both.declines(program, reason="`try` around it may catch", hint="validate_args=False")
    assert program.caught == (where == "around the step")


def test_code_that_the_step_compiles_itself_keeps_the_checks(both):
    """It is guarded on torch's functions: others in their place would have it compiled anew in the capture."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        normal = torch.compile(
            lambda x: Normal(x, torch.ones_like(x)).entropy().mean(), backend="eager", fullgraph=True
        )

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = -Categorical(logits=model(x), **CHECKED).log_prob(y).mean() + 0 * normal(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.declines(program, reason="read on the host", hint="validate_args=False")


def test_a_distribution_from_before_the_step_checks_again_outside_of_it(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        zero, one = torch.zeros((), device=run.device), torch.ones((), device=run.device)
        prior = Normal(zero, one, **CHECKED)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) - 0.01 * prior.log_prob(model.head.weight).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
            with pytest.raises(ValueError, match="within the support"):
                prior.log_prob(zero / 0)
        return model, optimizer

    both.equal(program, exact=True)


def test_other_threads_go_on_checking_and_so_do_objects_that_outlive_the_block():
    raised = []

    def elsewhere():
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            Normal(torch.tensor(0.0), torch.tensor(-1.0), **CHECKED)
        raised.append(True)

    with checks.checks_left_out():
        made = Normal(torch.tensor(0.0), torch.tensor(-1.0), **CHECKED)
        other = threading.Thread(target=elsewhere)
        other.start()
        other.join()
    assert raised
    with pytest.raises(ValueError, match="within the support"):
        made.log_prob(torch.tensor(float("nan")))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Normal(torch.tensor(0.0), torch.tensor(-1.0), **CHECKED)


def test_compiled_code_keeps_its_checks(both):
    """It is guarded on torch's functions: others in their place would have it compiled anew in the capture."""

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor = nn.Linear(8, 3)

        def forward(self, x, action):
            return Categorical(logits=self.actor(x), **CHECKED).log_prob(action)

    def program(run):
        model = Policy().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, action):
            loss = -model(x, action).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, action, *_ in minibatches(run.device, continuous=False):
            run.note(train_step(x, action))
        return model, optimizer

    run = both.alike(program, asked="aot_eager+graph")
    assert "torch/distributions/" in run.declined[0].reason
    assert run.status().tier == "aot_eager"


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
