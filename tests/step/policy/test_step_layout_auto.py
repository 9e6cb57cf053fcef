"""`auto` and the layout: it is tried where a model has convolutions, kept where it is faster, and left where not."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from test_step_auto import planted, reasons
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.layout import why_not
from hotloop.step.loop import loop as loop_module
from hotloop.step.policy import auto, states
from hotloop.step.ranks.peers import Peers
from hotloop.step.tiers import Tier

TIMES = {"eager": 0.040, "eager+graph": 0.039, "channels_last": 0.026, "channels_last+graph": 0.025}
SLOWER = {**TIMES, "channels_last": 0.052, "channels_last+graph": 0.050, "eager+graph": 0.010}


@pytest.fixture(autouse=True)
def _no_store(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


def build(*, channels_last=False):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    return model.to(memory_format=torch.channels_last) if channels_last else model


def train(run, steps, times, model=None, *, viewed=False, reads=False, total=100_000, layout="auto"):
    """Train for some steps; gives losses, the model and the loop."""
    model = build() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total, layout=layout)
    planted(loop, times)
    if reads:  # what can be compiled is tried first
        loop.policy.candidates.declined |= {"full", "regional"}

    @loop.step
    def step(x, y):
        features = model[:3](x)
        features = features.view(len(x), -1).view(len(x), 8, 10, 10) if viewed else features
        loss = F.cross_entropy(model[3:](features), y)
        loss.backward()
        if reads and loss.item() > 1e9:
            raise AssertionError
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 3, 12, 12, generator=data), torch.randint(0, 4, (4,), generator=data)
        losses.append(step(x, y).item())
    return losses, model, loop


def test_a_faster_layout_is_kept_and_training_is_eagers():
    eager = train("eager", 100, TIMES)
    with hotloop.testing.captured_step_emulation():
        losses, model, loop = train("auto", 100, TIMES)
        status = loop.status()
        assert status.tier == "channels_last+graph"
        loop.close()
    assert any("channels_last+graph against eager: faster" in line for line in reasons(loop))
    assert losses == pytest.approx(eager[0], rel=1e-4)
    for ours, theirs in zip(model.state_dict().values(), eager[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_a_layout_saves_counts_once_it_is_proven(monkeypatch):
    """A proof may go on with other evidence, and fail: until it agrees, nothing more may be lost for its saving."""
    told = []
    for name in ("proven", "proof_saves"):
        real = getattr(auto.Auto, name)
        monkeypatch.setattr(auto.Auto, name, lambda self, *what, n=name, do=real: (told.append(n), do(self, *what))[1])
    with hotloop.testing.captured_step_emulation():
        assert train("auto", 60, TIMES)[2].status().tier == "channels_last+graph"
    assert told.count("proof_saves") >= 2
    assert {*told[:2]} == {"proven", "proof_saves"}  # of one step, the last of the proof


def test_a_slower_layout_is_left_and_the_capture_is_tried():
    with hotloop.testing.captured_step_emulation():
        _, model, loop = train("auto", 120, SLOWER)
        assert loop.status().tier == "eager+graph"
    assert any(line.startswith("channels_last+graph against eager: no faster") for line in reasons(loop))


def test_a_step_that_cannot_run_so_is_declined_with_its_line():
    with hotloop.testing.captured_step_emulation():
        losses, model, loop = train("auto", 100, TIMES, viewed=True)
        status = loop.status()
    declined = {tier.name: tier.why for tier in status.tiers if tier.state == "declined"}
    assert "view size is not compatible" in declined["channels_last"]
    assert "features.view(len(x)" in declined["channels_last"]
    assert losses == pytest.approx(train("eager", 100, TIMES, viewed=True)[0], rel=1e-5)


@pytest.mark.parametrize("model", [lambda: build(channels_last=True), lambda: nn.Sequential(*build()[3:])])
def test_a_model_without_use_for_it_costs_nothing(model):
    made = model()
    optimizer = torch.optim.SGD(made.parameters())
    with hotloop.testing.captured_step_emulation():
        names = hotloop.Loop(made, optimizer).policy.candidates.names()
    assert "eager+graph" in names
    assert not any("channels_last" in name for name in names)


def test_on_a_cpu_it_is_for_those_who_ask():
    model = build()
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters()))
    assert not any("channels_last" in name for name in loop.policy.candidates.names())
    assert why_not(model.modules()) == ""


def test_a_step_that_cannot_be_captured_is_laid_out_all_the_same():
    with hotloop.testing.captured_step_emulation():
        loop = train("auto", 80, TIMES, reads=True)[2]
        assert loop.status().tier == "channels_last"
    assert any("channels_last against eager: faster" in line for line in reasons(loop))


def made(run="auto", layout="channels_last", model=None):
    model = build() if model is None else model
    return hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=2**-6), run=run, layout=layout)


def test_a_layout_that_is_asked_for_is_all_that_auto_tries():
    with hotloop.testing.captured_step_emulation():
        assert made().policy.candidates.names() == ["eager", "channels_last", "channels_last+graph"]
        loop = train("auto", 100, TIMES, layout="channels_last")[2]
        assert loop.status().tier == "channels_last+graph"


def test_a_layout_that_is_slower_is_left_though_it_was_asked_for():
    with hotloop.testing.captured_step_emulation():
        loop = train("auto", 120, SLOWER, layout="channels_last")[2]
        assert loop.status().tier == "eager"
    assert any("against eager: no faster" in line for line in reasons(loop))


def test_a_layout_that_is_to_stay_is_left():
    with hotloop.testing.captured_step_emulation():
        names = made(layout="as-given").policy.candidates.names()
        assert "eager+graph" in names
        assert not any("channels_last" in name for name in names)


def test_without_a_use_for_the_layout_auto_chooses_among_the_other_tiers(caplog):
    with hotloop.testing.captured_step_emulation():
        loop = made(model=nn.Linear(4, 4))
        assert "eager+graph" in loop.policy.candidates.names()
    assert "no convolution of the models has a kernel larger than 1" in caplog.text


def test_a_layout_joins_a_tier_that_compiles_nothing():
    with hotloop.testing.captured_step_emulation():
        assert made("eager+graph").policy.asked == "channels_last+graph"
        assert made("eager").policy.asked == "channels_last"
        assert made("eager", "as-given").policy.asked == "eager"


@pytest.mark.parametrize(
    ("run", "layout", "said"),
    [
        ("auto", "channels_last", "on a GPU only, and the model is on cpu"),
        ("full", "channels_last", "a compiler chooses the layout of its code itself"),
        ("channels_last", "as-given", "leave one of the two out"),
        ("auto", "channels-last", "'channels_last'"),
        ("auto", None, "layout None"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(run, layout, said):
    with pytest.raises(ConfigError, match=said):
        made(run, layout)


def test_a_layout_is_refused_where_auto_is_given_compiled_code():
    model = build()
    model.compile(backend="aot_eager")
    with hotloop.testing.captured_step_emulation(), pytest.raises(ConfigError, match="compiled already"):
        made(model=model)


def test_several_processes_leave_the_layout_and_say_so(monkeypatch):
    peers = mock.Mock(spec=Peers, size=2, alone=False)
    monkeypatch.setattr(loop_module, "peers_of_this_run", lambda: peers)
    with hotloop.testing.captured_step_emulation():
        loop = made()
    assert loop.policy.asked == "eager"
    assert any("is proven in one alone: call" in line and "the other tiers" in line for line in reasons(loop))


def test_what_the_tier_in_force_saves_already_is_no_gain_of_a_recording():
    """Eager takes 40 ms and the captured step, which is in force, 30: of 16 ms that a layout saves, 6 are its own."""
    times = {**TIMES, "eager+graph": 0.030}
    with hotloop.testing.captured_step_emulation():
        loop = train("auto", 80, times, total=2_000, layout="as-given")[2]
        policy = loop.policy
        assert policy.in_force.name == "eager+graph"
        policy.state = states.Preparing(Tier("channels_last", graph=True), 0.030)
        policy.proof_saves(0.016, "eager")
        assert sum(policy.state.savings.values()) == pytest.approx(0.006)
        for _ in range(2):  # the graph's own, against the layout without it, of which no step was timed
            policy.proof_saves(0.001, "channels_last")
            assert sum(policy.state.savings.values()) == pytest.approx(0.007)
