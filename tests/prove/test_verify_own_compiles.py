"""`verify` compares with a program that compiles nothing, not even what it compiles itself, and names that as the suspect."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop

WIDTH = 8


def by_hand(backend):
    """An Adam written by hand and compiled by the program, whose count is read by ``.item()``: pytorch#185382."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    parameters, count = list(model.parameters()), torch.zeros(())
    firsts, seconds = ([torch.zeros_like(one) for one in parameters] for _ in range(2))

    @torch.compile(backend=backend)
    @torch.no_grad()
    def adam(gradients):
        count.add_(1)
        steps = count.item()
        for parameter, gradient, first, second in zip(parameters, gradients, firsts, seconds, strict=True):
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            spread = (second.sqrt() / ((1 - 0.999**steps) ** 0.5)).add_(1e-8)
            parameter.addcdiv_(first, spread, value=-(0.01 / (1 - 0.9**steps)))

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        adam([one.grad for one in parameters])
        model.zero_grad()
        return loss.detach()

    draws = torch.Generator().manual_seed(1)
    batches = [(torch.randn(4, WIDTH, generator=draws), torch.randint(3, (4,), generator=draws)) for _ in range(20)]
    return hotloop.Workload(model, None, train_step, batches)


def spoilt(graph, _):
    """A backend whose code leaves matrices a tenth larger."""

    def run(*args):
        made = graph(*args)
        with torch.no_grad():
            for one in args:
                if isinstance(one, torch.Tensor) and one.dim() > 1:
                    one.mul_(1.1)
        return made

    return run


def test_wrong_code_of_the_programs_own_is_the_suspect():
    verdict = hotloop.verify(by_hand(spoilt), "aot_eager")
    assert not verdict.passes
    assert not verdict.blamed.regions
    assert "look at the code that the program compiles itself" in verdict.blamed.how


@pytest.mark.campaign
def test_a_program_that_compiles_a_part_of_its_step_rightly_passes():
    assert hotloop.verify(by_hand("aot_eager"), "aot_eager").passes


def test_a_compiled_step_of_torchs_optimizer_passes():
    """Compiled, torch's Adam counts in float32: its updates are 2e-5 off, which is no fault."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    own_step = torch.compile(optimizer.step, backend="eager")

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        own_step()
        optimizer.zero_grad()
        return loss.detach()

    batches = by_hand("eager").batches
    assert hotloop.verify(hotloop.Workload(model, optimizer, train_step, batches), "aot_eager").passes


def test_the_regions_are_searched_where_the_programs_own_code_is_right(monkeypatch):
    """The control: own code that is compiled is no suspect by itself."""
    program = by_hand("eager")
    tanh = torch.tanh

    class Wrong(nn.Module):
        def forward(self, x):
            return tanh(x) * (1.1 if torch.compiler.is_compiling() else 1.0)

    program.model[1] = Wrong()
    verdict = hotloop.verify(program, "aot_eager")
    assert [one.path for one in verdict.blamed.regions] == ["model.1"]
