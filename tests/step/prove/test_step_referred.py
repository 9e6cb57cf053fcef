"""Steps whose own rounding is large: a proof asks a step in more bits which of two results is wrong, if any."""

from unittest import mock

import pytest
import torch
from step_sentinels import Jitter, checked_every, jittered
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch import backends
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import code_proofs, proof, rounding_evidence, sentinel
from hotloop.step.prove.outcomes import kind_of
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.step.prove.wide_reference import wide_step
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program
from hotloop.testing import captured_step_emulation


class Cancelling(nn.Module):
    """Sums large numbers that nearly cancel; compiled, in another order, and times a factor where that is wrong."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(8, 4, bias=False), factor

    def forward(self, x):
        signs = 1e6 * (1 - 2 * (torch.arange(len(x)) % 2)).to(x.dtype)
        if torch.compiler.is_compiling():
            x, signs = x.flip(0), signs.flip(0) * self.factor
        return (self.layer(x).sum(1) * signs).sum()


def batch():
    x = torch.randn(32, 8)
    return torch.stack((x, x * (1 + 1e-3 * torch.randn_like(x))), 1).reshape(64, 8)


def trained(model, batch, tier="aot_eager", steps=16, sentinel=None):
    """Train for a few steps; gives the optimizer, and what became of the loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.5)
    loop = hotloop.Loop(model, optimizer, run=tier, sentinel=sentinel)

    @loop.step
    def step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with loop, hotloop.watch() as events:
        for _ in range(steps):
            step(batch())
        return optimizer, loop.status(), [one for one in events if isinstance(one, ev.TierDeclined)]


def run(factor):
    return trained(Cancelling(factor), batch)[1:]


def test_two_right_orders_of_a_sum_that_nearly_cancels_are_both_right():
    status, declined = run(1.0)
    assert not declined, declined
    assert status.tier == "aot_eager"


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_a_wrong_factor_is_found_beneath_such_rounding(factor):
    status, declined = run(factor)
    assert status.tier == "eager"
    assert "does not agree with eager" in declined[0].reason


@pytest.fixture
def no_more_bits(monkeypatch):
    """A float32 step of a UNet may need more memory than there is."""
    monkeypatch.setattr("hotloop.step.prove.code_proofs.in_more_bits", lambda *_: None)


class Learnt(nn.Module):
    """Two layers that have learnt to cancel: what is left of them is rounding, and in another state it is not."""

    def __init__(self, factor=1.0, apart=1e-6):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.factor = nn.Linear(16, 8), nn.Linear(16, 8), factor
        with torch.no_grad():
            for one, other in zip(self.first.parameters(), self.second.parameters(), strict=True):
                other.copy_(one + apart * torch.randn_like(one))

    def forward(self, x):
        if torch.compiler.is_compiling():  # the same, in another order
            joined = nn.functional.linear(x, self.first.weight - self.second.weight, self.first.bias - self.second.bias)
            return (joined * self.factor + (joined * (1 - self.factor)).detach()).square().sum()
        return (self.first(x) - self.second(x)).square().sum()


def learnt(factor=1.0, tier="aot_eager", steps=12):
    """Train such a model; gives it, its optimizer, and what became of the loop."""
    model = Learnt(factor)
    torch.manual_seed(2)
    return model, *trained(model, lambda: torch.randn(32, 16), tier, steps)


@pytest.mark.usefixtures("no_more_bits")
def test_without_the_step_in_more_bits_other_roundings_of_it_tell():
    _, _, status, declined = learnt()
    assert not declined
    assert status.tier == "aot_eager"


@pytest.mark.usefixtures("no_more_bits")
@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 0.97, 1.03, 2.0])
def test_without_more_bits_a_wrong_factor_is_found_as_well(factor):
    _, _, status, (declined,) = learnt(factor)
    assert status.tier == "eager"
    assert "does not agree with eager" in declined.reason


@pytest.mark.usefixtures("no_more_bits")
@pytest.mark.parametrize("fails", ["_displace", "_nudge", "free_bytes", "differences"])
def test_where_other_roundings_cannot_be_had_the_code_is_judged_without_them(monkeypatch, fails):
    tried = []

    def fail(*args, **_):
        tried.append(True)
        if fails == "free_bytes":
            return 0
        if fails == "differences":
            raise CandidateFailedError
        if len(tried) > 1:
            raise torch.OutOfMemoryError
        return getattr(rounding_evidence, "plain_" + fails)(*args)

    for name in ("_displace", "_nudge"):
        monkeypatch.setattr(rounding_evidence, "plain_" + name, lambda one, *_: one.mul_(1.5), raising=False)
    monkeypatch.setattr(StepOutputs if fails == "differences" else rounding_evidence, fails, fail)
    model, _, status, _ = learnt()
    assert tried
    assert status.tier == "eager"
    assert torch.equal(model.first.weight, learnt(tier="eager")[0].first.weight)


class Shaky(Learnt):
    """The same, of kernels that round in another way from run to run; and that do more than that, where told so."""

    also = 0.0

    def forward(self, x):
        found = self.first(jittered(x)) - self.second(x)
        with mock.patch.object(Jitter, "size", self.also):
            return (found * jittered(torch.ones(()))).square().sum()


@pytest.mark.parametrize("also", [0.0, 0.01, 0.5])
def test_a_step_whose_rounding_alone_is_not_alike_is_captured(also, monkeypatch):
    """In another state it is alike, unless something else changes from run to run as well, by much or by little."""
    monkeypatch.setattr(Shaky, "also", also)
    monkeypatch.setattr(Jitter, "size", 1e-7)
    model = Shaky(apart=1e-6)
    torch.manual_seed(2)
    with captured_step_emulation():
        _, status, declined = trained(model, lambda: torch.randn(32, 16), "eager+graph", 24)
    if also:
        assert "does not repeat itself" in declined[0].reason
    else:
        assert not declined, declined[0].reason
    assert status.tier == ("eager" if also else "eager+graph")


@pytest.mark.usefixtures("no_more_bits")
def test_a_step_that_does_not_repeat_itself_has_no_other_roundings(monkeypatch):
    """Else its noise would leave room for any code."""
    forward, draws = Learnt.forward, torch.Generator()

    def noisy(self, x):
        found = forward(self, x)
        return found if torch.compiler.is_compiling() else found * (1 + noise(found))

    monkeypatch.setattr(Learnt, "forward", noisy)
    noise = torch.compiler.disable(lambda like: torch.randn(like.shape, generator=draws))
    _, _, status, _ = learnt()
    assert status.tier == "eager"


@pytest.mark.usefixtures("no_more_bits")
def test_other_roundings_leave_nothing_behind(monkeypatch):
    """Parameters are moved for a moment only, and no random number of the program's is drawn."""
    judged, roundings = [], code_proofs.roundings
    monkeypatch.setattr(code_proofs, "roundings", lambda *args: judged.append(roundings(*args)) or judged[-1])
    frozen = torch.ones(8, 1).expand(8, 3)  # torch writes into it through a view alone
    made = Learnt.__init__

    def with_frozen(self, *args, **settings):
        made(self, *args, **settings)
        self.frozen = nn.Parameter(frozen, requires_grad=False)

    monkeypatch.setattr(Learnt, "__init__", with_frozen)
    ends = []
    for tier in ("eager", "aot_eager"):
        model, optimizer, *_ = learnt(tier=tier, steps=5)  # all but the first are proof steps, whose outcome is eager's
        ends.append((model.first.weight, optimizer.state[model.first.weight]["momentum_buffer"], torch.rand(3)))
    assert len(judged) == proof.STEPS
    assert all(one is not None and all(each.agrees for each in one.values()) for one in judged)
    for eager, proven in zip(*ends, strict=True):
        assert torch.equal(eager, proven)


def test_more_bits_tell_over_three_steps_before_other_roundings_are_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(code_proofs, "roundings", lambda *_: asked.append(True))
    status, declined = run(1.0)
    assert not declined, declined
    assert status.tier == "aot_eager"
    assert not asked


class Deep(nn.Module):
    """Layers with BatchNorm, whose rounding under bfloat16 is as large as their gradients; their backward may be wrong."""

    def __init__(self, factor, width):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.factor = nn.Linear(16, width), nn.Linear(width, 4), factor
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(12)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            weight = layer[0].weight
            if torch.compiler.is_compiling():  # the same value, and another gradient
                weight = weight * self.factor + (weight * (1 - self.factor)).detach()
            x = layer[2](layer[1](torch.nn.functional.linear(x, weight)))
        return self.last(x)


@pytest.mark.campaign
@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize(("factor", "width"), [(0.0, 7), (0.5, 24), (1.4, 7), (2.0, 24)])
@pytest.mark.some_of(3)
def test_gradients_that_are_mostly_rounding_are_held_to_their_length(factor, bits, width, request):
    if not bits:
        request.getfixturevalue("no_more_bits")
    model = Deep(factor, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop:

        @loop.step
        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(10):
            step(torch.randn(16, 16), torch.randint(4, (16,)))
        assert loop.status().tier == "eager"


@pytest.mark.parametrize(("autocast", "expected"), [(True, torch.float32), (False, torch.float64)])
def test_a_step_in_16_bits_is_held_against_float32(autocast, expected):
    """float64 would take twice the memory, and tell no more."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None)

    @loop.step
    def step(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 8)
    with loop:
        for _ in range(4):
            step(x)
        found = rounding_evidence.in_more_bits(loop._runners[0].code._runs, ((x,), {}))
    assert found["gradient of weight at the optimizer step"].dtype == expected


def test_where_a_proof_needed_more_bits_its_limits_are_learnt_and_checks_need_none(monkeypatch):
    """By the normal limits each third check is a suspicion, and a step in more bits follows.

    Few are one by the learnt limits: a step's rounding may be larger than that of all steps of the proof.
    """
    steps = []
    original = sentinel.in_more_bits
    monkeypatch.setattr(sentinel, "in_more_bits", lambda *given: steps.append(1) or original(*given))
    with checked_every(1):
        _, status, declined = trained(Cancelling(), batch, sentinel=0.5, steps=20)
    (checked,) = status.sentinels
    assert checked.checks > 10
    assert checked.suspicions < checked.checks / 4
    assert len(steps) <= 3 * checked.suspicions
    assert not declined


def test_a_step_in_more_bits_keeps_no_optimizer_state():
    """Two copies of the model's size, in more bits, that nothing is compared with."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(2, 4)
    step(x)
    holdings = Holdings({"model": model}, {"optimizer": optimizer})
    program = Program(step, holdings, torch.device("cpu"), lambda: False)
    made = wide_step(program, ((x,), {}), torch.float64, [])
    assert {kind_of(name) for name in made} == {"result", "gradient", "parameter"}


@pytest.mark.campaign
def test_limits_that_were_learnt_hide_no_gradient_of_zeros(monkeypatch):
    """In a step in more bits its length tells; beside eager alone a learnt limit of its slope is above 1."""
    from torch._dynamo.backends.common import aot_autograd

    draws, products = torch.Generator().manual_seed(5), ("aten.mm", "aten.addmm")

    def compiler(graph, _inputs):
        class Rounds(torch.fx.Interpreter):
            def run_node(self, node):
                result = super().run_node(node)
                if node.op != "call_function" or str(getattr(node.target, "overloadpacket", "")) not in products:
                    return result
                return (result.float() * (1 + 2**-9 * torch.randn(result.shape, generator=draws))).to(result.dtype)

        def run(args):
            given = list(args)
            args.clear()
            return Rounds(graph).run(*given)

        run._boxed_call = True
        return run

    made = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)
    monkeypatch.setattr(backends, "aot_eager", lambda *_, **__: made)
    factor = torch.ones(())

    class First(Deep):
        def forward(self, x):
            weight = self.layers[0][0].weight
            if torch.compiler.is_compiling():
                weight = weight * self.factor + (weight * (1 - self.factor)).detach()
            x = torch.nn.functional.linear(self.first(x), weight)
            for number, layer in enumerate(self.layers):
                x = layer[2](layer[1](layer[0](x) if number else x))
            return self.last(x)

    model = First(1.0, 24)
    del model.factor
    model.register_buffer("factor", factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    with checked_every(2), hotloop.Loop(model, optimizer, run="aot_eager") as loop:

        @loop.step
        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number in range(140):
            if number == 100:
                assert loop.status().tier == "aot_eager"
                factor.zero_()
            step(torch.randn(16, 16), torch.randint(4, (16,)))
        assert loop.status().tier == "eager"
        assert "layers.0.0.weight" in str(loop.status())
