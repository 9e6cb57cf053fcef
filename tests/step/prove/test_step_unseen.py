"""A gradient that is zero throughout a proof is not proven: compiled code is proven again at the first that is not."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.step.prove.unseen import SHARE, Unseen
from hotloop.testing import captured_step_emulation

TIERS = ["aot_eager", "aot_eager+graph"]


class Behind(nn.Module):
    """A layer whose gradient is zero as long as what stands behind it is zero; compiled, its gradient may be wrong."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.factor = nn.Linear(8, 8), factor
        self.inner = nn.Parameter(torch.randn(4, 8))
        self.make()

    def hidden(self, x):
        inner = self.inner
        if torch.compiler.is_compiling():  # the same value; its gradient is times the factor
            inner = inner * self.factor + (inner * (1 - self.factor)).detach()
        return F.linear(x, inner)


class Lora(Behind):
    def make(self):
        self.outer = nn.Parameter(torch.zeros(8, 4))

    def forward(self, x):
        return self.base(x) + F.linear(self.hidden(x), self.outer)


class ZeroConvolution(Behind):
    def make(self):
        self.outer = nn.Conv1d(4, 8, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x):
        return self.base(x) + self.outer(torch.tanh(self.hidden(x))[:, :, None])[:, :, 0]


class AdaptiveNormZero(Behind):
    def make(self):
        self.gate = nn.Linear(8, 4)
        nn.init.zeros_(self.gate.weight)
        nn.init.zeros_(self.gate.bias)
        self.outer = nn.Linear(4, 8)

    def forward(self, x):
        return self.base(x) + self.outer(self.gate(x) * F.layer_norm(self.hidden(x), (4,)))


class Thawed(Lora):
    def make(self):
        super().make()
        nn.init.ones_(self.outer)
        self.inner.requires_grad_(False)


class Dead(Lora):
    def forward(self, x):
        return self.base(x) + 0.0 * self.hidden(x).sum()


PROGRAMS = {  # the model, steps for an update, updates at a rate of 0, the step at which it thaws
    "LoRA, accumulated": (Lora, 12, 0, None),
    "LoRA, warm-up from 0": (Lora, 1, 12, None),
    "zero convolution": (ZeroConvolution, 1, 12, None),
    "adaLN-zero": (AdaptiveNormZero, 12, 0, None),
    "thawed": (Thawed, 1, 0, 12),
}


def train(name, tier, factor=1.0, steps=48, **settings):
    make, together, warm_up, thaws = PROGRAMS[name]
    model = make(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: float(update >= warm_up))
    with (
        captured_step_emulation(),
        hotloop.watch() as events,
        hotloop.Loop(model, optimizer, run=tier, **{"sentinel": 0, **settings}) as loop,
    ):

        @loop.step
        def step(x, update):
            loss = (model(x) - x.roll(1, 1)).square().mean() / together
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        for number in range(steps):
            model.inner.requires_grad_(number >= thaws if thaws is not None else True)
            update = (number + 1) % together == 0
            step(torch.randn(16, 8, generator=torch.Generator().manual_seed(number)), update)
            if update:
                warm.step()
        return model, loop.status(), events


def moved(model, since):
    return (model.inner - since.inner).norm().item()


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_wrong_code_is_found_at_the_first_gradient_that_is_not_zero(name, tier):
    eager, _, _ = train(name, "eager")
    model, status, events = train(name, tier, factor=-1.0)
    assert any(isinstance(one, ev.TierProven) and one.step < 12 for one in events)  # it was in force before
    declined = [one for one in events if isinstance(one, ev.TierDeclined)]
    assert "gradient of inner" in declined[0].reason
    assert declined[0].step <= 18
    assert "aot_eager" not in status.tier
    # One gradient of the wrong sign was trained on, and not those of all steps.
    assert moved(model, eager) < 0.25 * moved(eager, type(eager)(1.0))


@pytest.mark.parametrize(
    ("name", "tier"), [("LoRA, accumulated", "aot_eager+graph"), ("LoRA, warm-up from 0", "aot_eager")]
)
def test_right_code_is_proven_again_and_stays(name, tier):
    model, status, events = train(name, tier)
    assert status.tier == tier
    code = [one.step for one in events if isinstance(one, ev.TierProven) and one.tier == "aot_eager"]
    assert len(code) == 2
    assert 12 <= code[1] <= 17
    torch.testing.assert_close(dict(model.named_parameters()), dict(train(name, "eager")[0].named_parameters()))


@pytest.mark.parametrize("tier", TIERS)
def test_a_gradient_that_stays_zero_costs_no_further_proof(tier, monkeypatch):
    monkeypatch.setitem(PROGRAMS, "dead", (Dead, 1, 0, None))
    _, status, events = train("dead", tier, steps=30)
    assert status.tier == tier
    assert len([one for one in events if isinstance(one, ev.TierProven) and one.tier == "aot_eager"]) == 1


def train_in_warm_up(tier, factor, *, few_bits=False, steps=60):
    """Train LoRA with AdamW while its rate rises from 0: the gradient of A grows out of rounding after the proof."""
    model = Lora(factor)
    before = model.inner.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: update / 100)
    with hotloop.watch() as events, hotloop.Loop(model, optimizer, run=tier, sentinel=0) as loop:

        @loop.step
        def step(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=few_bits):
                out = model(x)
            loss = (out.float() - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number in range(steps):
            step(torch.randn(16, 8, generator=torch.Generator().manual_seed(number)))
            warm.step()
        return (model.inner.detach() - before).flatten(), loop.status(), events


@pytest.mark.parametrize(("factor", "few_bits"), [(-1.0, False), (-1.0, True), (1.5, False)])
def test_a_gradient_that_grows_out_of_rounding_is_proven(factor, few_bits):
    eager, _, _ = train_in_warm_up("eager", factor, few_bits=few_bits)
    moved_by, status, events = train_in_warm_up("aot_eager", factor, few_bits=few_bits)
    assert status.tier == "eager"
    declined = [one for one in events if isinstance(one, ev.TierDeclined)]
    assert "gradient of inner" in declined[0].reason
    assert F.cosine_similarity(eager, moved_by, dim=0) > 0.98


def test_right_code_whose_gradient_grows_out_of_rounding_stays():
    moved_by, status, events = train_in_warm_up("aot_eager", 1.0)
    torch.testing.assert_close(moved_by, train_in_warm_up("eager", 1.0)[0])
    assert status.tier == "aot_eager"
    assert 2 <= len([one for one in events if isinstance(one, ev.TierProven)]) <= 3


def unseen(rest=0):
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return Unseen({"one": parameter}, rest), parameter


def test_looks_become_a_share_of_the_steps_and_stop_once_all_was_seen():
    one, _ = unseen()
    looks = [number for number in range(1, 10_001) if one.due()]
    assert looks[:SHARE] == list(range(1, SHARE + 1))
    assert len(looks) < 8 * SHARE
    assert all(later - before <= 1 + later / SHARE for before, later in itertools.pairwise(looks))
    assert not any(Unseen({}).due() for _ in range(10))


@pytest.mark.parametrize("value", [1e-15, float("nan"), float("-inf")])
def test_whatever_is_not_zero_has_appeared(value):
    one, parameter = unseen()
    assert one.due()
    one.look_after({})
    assert not one.appeared()
    one.look_after({"one": torch.tensor([0.0, value]), "another": torch.ones(1)})
    assert one.appeared()
    assert not one.appeared()
    one.look_before(torch.optim.SGD([parameter, nn.Parameter(torch.ones(1))]))
    assert not one.appeared()


def test_a_gradient_below_its_floor_is_rounding():
    parameter = nn.Parameter(torch.ones(4))
    one = Unseen({"one": parameter}, floors={"one": 0.5})
    for value, appeared in ((0.4, False), (0.6, True), (float("nan"), True)):
        parameter.grad = torch.full((4,), value)
        one.look_after({})
        assert one.appeared() is appeared


def test_a_frozen_parameter_is_asked_for_no_gradient():
    asked = []

    class Frozen(nn.Parameter):
        @property
        def grad(self):
            asked.append(self.requires_grad)

    one = Unseen({"one": Frozen(torch.ones(2), requires_grad=False), "two": Frozen(torch.ones(2))})
    one.look_after({})
    assert asked == [True]


def test_a_gradient_that_its_proof_misses_again_is_waited_for_longer():
    one, parameter = unseen()
    parameter.grad.fill_(1.0)
    one.look_after({})
    assert one.appeared()
    again = Unseen.after([], one.parameters, one)
    assert (again.rest, again.due()) == (SHARE, False)
    again.found = True
    assert Unseen.after([], one.parameters, again).rest == 2 * SHARE
    assert Unseen.after([], {}, again).rest == 0


class Heads(nn.Module):
    """A trunk and eight heads, one of which a step trains; the others' gradients are zero."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x, chosen):
        hidden = torch.tanh(self.trunk(x))
        return sum(head(hidden) * chosen[number] for number, head in enumerate(self.heads))


def test_proofs_end_where_heads_take_turns():
    torch.manual_seed(0)
    model, turns = Heads(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with hotloop.watch() as events, hotloop.Loop(model, optimizer, run="aot_eager", sentinel=0) as loop:

        @loop.step
        def step(x, chosen):
            loss = (model(x, chosen) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(200):
            step(torch.randn(4, 8, generator=turns), F.one_hot(torch.randint(8, (), generator=turns), 8).float())
        assert loop.status().tier == "aot_eager"
    proofs = [one.step for one in events if isinstance(one, ev.TierProven)]
    assert 2 <= len(proofs) <= 8  # each has seen a head that none had, of some steps
    assert proofs[-1] < 100
