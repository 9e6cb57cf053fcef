"""What a step compiles itself: it is compared with its uncompiled form, named where it is wrong, and left as it is."""

import logging

import pytest
import torch
from step_programs import GRAPH
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

import hotloop
from hotloop import events as ev
from hotloop import interrupts
from hotloop.step.prove.own_code import AFTER
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.testing import captured_step_emulation

WIDTH, STEPS = 8, AFTER + 8


def spoilt(graph, _):
    """A backend whose code is 10% off."""
    return lambda *args: [made * 1.1 for made in graph(*args)]


def unseen(graph, _):
    """A backend whose kernels are no operations of torch's, as Inductor's are: nobody sees what they write."""

    def run(*args):
        with _disable_current_modes():
            return graph(*args)

    return run


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1), nn.Linear(WIDTH, 3))


def trained(step, model, optimizer=None, *, run=None):
    """Train with a step; return the loop, and the parameters that it has left."""
    draws = torch.Generator().manual_seed(1)
    loop = hotloop.Loop(model, optimizer, run=run) if run else None
    step = loop.step(step) if loop is not None else step
    for _ in range(STEPS):
        step(torch.randn(4, WIDTH, generator=draws), torch.randint(3, (4,), generator=draws))
    return loop, [one.detach().clone() for one in model.parameters()]


def with_a_loss(run=None, backend="eager", loss=None):
    """Train with a loss that the program compiles itself."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @torch.compile(backend=backend)
    def own_loss(logits, y):
        return F.cross_entropy(logits, y) if loss is None else loss(logits, y)

    def train_step(x, y):
        found = own_loss(model(x), y)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    return trained(train_step, model, optimizer, run=run)


def warnings(caplog):
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING and one.name == "hotloop"]


def decisions(loop):
    return [one for one in loop.record.document["decisions"] if one.get("action") == "compare own compiles"]


def test_wrong_code_of_the_programs_own_is_named_once(caplog):
    loop, _ = with_a_loss("aot_eager", spoilt)
    (told,) = warnings(caplog)
    assert "own_loss (" in told
    assert f"{__file__}:" in told
    assert "does not agree with its uncompiled form" in told
    (decided,) = decisions(loop)
    assert decided["agrees"] is False
    assert loop.status().tier == "aot_eager"  # whose own code is right


def test_it_is_found_too_where_the_tier_was_declined_before(caplog):
    """A value that is read on the host keeps the step from being captured, and is no reason to leave the rest unseen."""
    with captured_step_emulation():
        loop, _ = with_a_loss(GRAPH, spoilt, lambda logits, y: F.cross_entropy(logits, y) * max(1.0, y[0].item() * 0.0))
    assert loop.status().tier == "eager"
    assert [one for one in warnings(caplog) if "does not agree with its uncompiled form" in one]


def test_right_code_is_told_as_such_and_the_comparison_leaves_no_trace(caplog):
    loop, ours = with_a_loss("aot_eager")
    assert not warnings(caplog)
    (decided,) = decisions(loop)
    assert decided["agrees"] is True
    assert all(torch.equal(*pair) for pair in zip(ours, with_a_loss()[1], strict=True))


def test_a_recording_replays_on_after_the_comparison():
    with captured_step_emulation(), hotloop.watch() as events:
        loop, ours = with_a_loss(GRAPH)
    assert decisions(loop)
    assert not [one for one in events if isinstance(one, ev.CaptureDropped | ev.TierDeclined)]
    assert loop.last_ran() == (GRAPH, "run")
    for pair in zip(ours, with_a_loss()[1], strict=True):
        torch.testing.assert_close(*pair)


def test_compiled_code_that_draws_random_numbers_is_not_compared(caplog):
    """Inductor draws others than eager does, by design."""
    loop, _ = with_a_loss("aot_eager", loss=lambda logits, y: F.cross_entropy(F.dropout(logits, 0.5), y))
    (decided,) = decisions(loop)
    assert "draws random numbers" in decided["reason"]
    assert not warnings(caplog)


@pytest.mark.campaign
def test_a_condition_within_it_is_no_fault(caplog):
    loop, _ = with_a_loss(
        "aot_eager",
        loss=lambda logits, y: torch.cond(
            y.sum() > 3, F.cross_entropy, lambda a, b: 2 * F.cross_entropy(a, b), (logits, y)
        ),
    )
    (decided,) = decisions(loop)
    assert decided["agrees"] is True
    assert not warnings(caplog)


def test_a_step_that_compiles_nothing_is_run_no_more_often():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train_step(x, y):
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    loop, _ = trained(train_step, model, optimizer, run="aot_eager")
    assert not decisions(loop)


@pytest.mark.parametrize("run", ["aot_eager", "as-given+graph", None])
def test_tensors_that_compiled_code_alone_writes_are_put_back(run):
    """Nobody saw such writes, and what a proof had run once more stayed: the moments of this optimizer, and its count."""
    model, count = network(), torch.zeros(())
    moments = [torch.zeros_like(one) for one in model.parameters()]

    @torch.compile(backend=unseen)
    @torch.no_grad()
    def update(parameters, gradients):
        count.add_(1)
        for parameter, gradient, moment in zip(parameters, gradients, moments, strict=True):
            moment.mul_(0.9).add_(gradient)
            parameter.sub_(moment, alpha=0.1)

    def train_step(x, y):
        F.cross_entropy(model(x), y).backward()
        update(list(model.parameters()), [one.grad for one in model.parameters()])
        model.zero_grad()

    if run == "as-given+graph":
        model.compile(backend="eager")
    with captured_step_emulation():
        trained(train_step, model, run=run)
    assert count.item() == STEPS


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("optimizer", "run"),
    [(torch.optim.AdamW, "aot_eager"), (torch.optim.AdamW, GRAPH), (torch.optim.RAdam, "aot_eager")],
)
def test_a_compiled_step_of_torchs_optimizer_agrees_and_stays_compiled(caplog, optimizer, run):
    """Compiled, torch's Adam counts in float32, which is no fault. A new hook at each proof used up torch's recompiles."""
    codes = []

    def backend(graph, _):
        codes.append(graph)
        return graph

    model = network()
    made = optimizer(model.parameters(), 0.01)
    own_step = torch.compile(made.step, backend=backend)

    def train_step(x, y):
        F.cross_entropy(model(x), y).backward()
        own_step()
        made.zero_grad()

    with captured_step_emulation():
        loop, _ = trained(train_step, model, made, run=run)
    assert not warnings(caplog)
    (decided,) = decisions(loop)
    assert decided["agrees"] is True
    assert len(codes) <= 4  # with the hook and without, and the same for a recording


def test_interrupts_wait_while_it_is_compared(monkeypatch):
    """One in an exchange of state left the random stream of the step before, and its parameters changed."""
    waits, compare = [], StepOutputs.compare

    def noted(*args, **kwargs):
        waits.append(interrupts._handlers.wait)
        return compare(*args, **kwargs)

    monkeypatch.setattr(StepOutputs, "compare", noted)
    loop, _ = with_a_loss("aot_eager")
    assert decisions(loop)
    assert waits
    assert all(waits)
