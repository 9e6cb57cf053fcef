"""Steps without an optimizer, as torch's own language-model example has: they update by hand, and carry a hidden state."""

import pytest
import torch
from step_programs import GRAPH, Both
from torch import nn
from torch.nn import functional as F

import hotloop

WORDS, WIDTH = 11, 8


class Carries(nn.Module):
    """A recurrent network that compilers trace."""

    def __init__(self):
        super().__init__()
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids, hidden):
        found = []
        for word in self.words(ids).unbind(0):
            hidden = torch.tanh(self.inner(torch.cat([word, hidden], -1)))
            found.append(self.out(hidden))
        return torch.stack(found), hidden


def by_hand(given=(), *, tracked=False):
    """A program whose step subtracts gradients itself, past the counting of writes or not."""

    def program(run):
        model = Carries().to(run.device)
        rate = 0.5

        def train_step(ids, hidden):
            model.zero_grad()
            logits, after = model(ids, hidden.detach())
            loss = F.cross_entropy(logits[:-1].flatten(0, 1), ids[1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            with torch.no_grad():
                for parameter in model.parameters():
                    place = parameter if tracked else parameter.data
                    place.add_(parameter.grad, alpha=-rate)
            return loss, after

        if run.owned:
            run.loops.append(hotloop.Loop(model, *given, run=run._asked))
            train_step = run.loops[-1].step(train_step)
        hidden = torch.zeros(3, WIDTH, device=run.device)
        for step in range(16):
            rate = 0.5 if step < 12 else 0.25
            loss, hidden = train_step(torch.randint(WORDS, (5, 3)).to(run.device), hidden)
            run.note(loss.detach())
        return {"model": model}

    return program


@pytest.mark.parametrize("given", [(), (None,), ([],), ({},)], ids=repr)
def test_a_loop_needs_no_optimizer(both, given):
    run = both.alike(by_hand(given), exact=True)
    assert not run.declined, run.declined
    assert run.status().tier == GRAPH
    why = {tier.name: tier.why for tier in run.status().tiers}
    assert why["eager"].startswith(f"beside {GRAPH}: first calls of their kind"), "steps that ran eager have no reason"


@pytest.mark.parametrize("tracked", [False, True])
def test_compiled_code_of_a_step_that_updates_by_hand_and_carries_its_hidden_state(tracked):
    run = Both("cpu").alike(by_hand(tracked=tracked), asked="aot_eager")
    assert not run.declined, run.declined
    assert run.status().tier == "aot_eager"


def test_a_hidden_state_whose_graph_waits_for_a_backward_is_declined_with_what_to_detach():
    """It was computed outside of the step, and the step's backward reaches what it was made of."""
    model, first = Carries(), nn.Linear(WIDTH, WIDTH)
    loop = hotloop.Loop(model, run="aot_eager")

    @loop.step
    def train_step(ids, hidden):
        loss = model(ids, hidden)[0].square().mean()
        loss.backward()
        return loss.detach()

    train_step(torch.randint(WORDS, (5, 3)), first(torch.randn(3, WIDTH)))
    (why,) = [tier.why for tier in loop.status().tiers if tier.name == "aot_eager"]
    assert "an argument requires gradients" in why
    assert "return hidden.detach()" in why
