"""Several runs of one program in one process: what the later ones know, prove again, and pay for together."""

import dataclasses

import pytest
import torch
from torch import nn

import hotloop
from hotloop.compiling import apply
from hotloop.decide import Facts
from hotloop.errors import ConfigError
from hotloop.measure import Timing
from hotloop.step.policy import auto, background_tiers, history, states

TIMES = {"eager": 0.010, "eager+graph": 0.002, "full": 0.009, "full+graph": 0.0018}


class Clock:
    """A clock on which a step takes what the test says that its tier takes."""

    def __init__(self, ran, times):
        self.ran, self.times, self.dropped, self.stopped = ran, times, 0, 0

    def start(self, *, alone=False):
        return None

    def stop(self, mark):
        self.stopped += 1

    def cancel(self, mark):
        pass

    def take(self):
        found, self.stopped = self.stopped, 0
        ran = [entry.tier for entry in list(self.ran)[:found]]
        return [Timing(self.times[tier], 0.9 * self.times[tier]) for tier in ran]


@pytest.fixture(autouse=True)
def _no_store(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


def trial(
    run="auto",
    *,
    steps=60,
    times=TIMES,
    total=50_000,
    runs=None,
    rate=2**-6,
    width=16,
    dropout=0.25,
    prepared=None,
):
    """One run of a search; gives losses, model and loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total, runs=runs)
    loop.stepping.times.clock, loop.stepping.reference_times.clock = (
        Clock(loop.stepping.times.what, times),
        Clock(loop.stepping.reference_times.what, times),
    )
    if prepared is not None:
        prepared(loop)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(1)
    data = torch.Generator().manual_seed(2)
    losses = [step(torch.randn(4, 8, generator=data)) for _ in range(steps)]
    loop.status()
    return losses, model, loop


def decisions(loop):
    return [entry["reason"] for entry in loop.record.document["decisions"]]


def eager_steps(loop):
    return next(tier.steps for tier in loop.status().tiers if tier.name == "eager")


def test_the_second_run_starts_from_the_firsts_verdict_and_proves_its_own_recording():
    with hotloop.testing.captured_step_emulation():
        first, second = trial(), trial(rate=2**-7)
        assert [one[2].status().tier for one in (first, second)] == ["eager+graph"] * 2
        assert any("eager+graph against eager: faster" in line for line in decisions(first[2]))
        said = decisions(second[2])
    assert not any("against" in line and "pairs" in line for line in said)  # nothing is timed by turns again
    assert not any("side by side" in line for line in said)  # nor said to be
    assert any(line.endswith("in eager as timed in an earlier run of this process") for line in said)
    assert any("eager+graph: proven in" in line for line in said)
    proven = [one for one in second[2].record.document["events"] if one["kind"] == "tier_proven"]
    assert [one["tier"] for one in proven] == ["eager+graph"]
    assert eager_steps(second[2]) <= 4 < eager_steps(first[2])
    eager = trial("eager", rate=2**-7)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(second[0], eager[0], strict=True))


def test_another_dropout_is_another_program():
    with hotloop.testing.captured_step_emulation():
        first, other, again = (trial(dropout=value, steps=1)[2] for value in (0.25, 0.5, 0.25))
    assert other.policy.history.program is not first.policy.history.program
    assert again.policy.history.program is first.policy.history.program


@pytest.mark.parametrize("held", [True, False])
def test_only_code_that_this_process_holds_is_counted_as_there(held):
    """The verdict of an earlier run stays; what it takes to get there depends on whether the code is still held."""
    apply.forget_roots()
    if held:
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.Linear(16, 1))
        hotloop.compile(model, "aot_eager")(torch.randn(4, 8))
    first = trial(steps=1)[2].policy.history
    first.program.eager_seconds, first.program.ratios = 0.01, dict.fromkeys(("full", "eager+graph"), (0.5, 0.6))
    second = trial(steps=1)[2].policy.history
    facts = Facts(device="cpu", eager_seconds=0.01)
    recalled = {name: second.option(name, facts, None) for name in ("full", "eager+graph", "regional")}
    assert [name for name, option in recalled.items() if option] == (["full"] if held else []) + ["eager+graph"]
    assert all(option.recalled for option in recalled.values() if option)


def test_another_shape_is_another_program():
    with hotloop.testing.captured_step_emulation():
        trial()
        other = trial(width=24)[2]
    assert any("pairs" in line for line in decisions(other))


def test_what_was_no_faster_is_not_tried_by_later_runs():
    slower = {**TIMES, "eager+graph": 0.0105}
    with hotloop.testing.captured_step_emulation():
        first, second = (trial(times=slower, steps=80)[2] for _ in range(2))
    assert any("no faster" in line for line in decisions(first))
    assert [tier.name for tier in second.status().tiers] == ["eager"]


def test_a_later_run_too_short_for_the_proof_stays_eager():
    with hotloop.testing.captured_step_emulation():
        trial()
        short = trial(steps=6, total=6)[2]
    assert short.status().tier == "eager"


class Child:
    """A background compile that goes on until the test lets it end."""

    made = []

    def __init__(self):
        self.stopped = False
        self.made.append(self)

    @classmethod
    def start(cls, factory, settings, **limits):
        return cls()

    def poll(self):
        return "running"

    def stop(self):
        self.stopped = True


@pytest.fixture
def children(monkeypatch):
    kind = type("OneChild", (Child,), {"made": []})
    monkeypatch.setattr(background_tiers, "BackgroundCompile", kind)
    return kind.made


def with_factory(loop):
    object.__setattr__(loop.context, "workload", "programs.py:make")
    loop.policy.background.unavailable = ""


SLOW = {**TIMES, "eager": 1.0, "full": 0.4}


def test_a_child_that_compiles_goes_on_for_the_next_run_and_ends_with_the_last(children):
    first = trial(times=SLOW, total=100_000, steps=20, runs=3, prepared=with_factory)[2]
    first.close()
    assert [one.stopped for one in children] == [False]
    second = trial(times=SLOW, total=100_000, steps=20, runs=2)[2]
    assert second.policy.background.tier == "full"
    assert len(children) == 1
    second.close()
    third = trial(times=SLOW, total=100_000, steps=20, runs=1)[2]
    third.close()
    assert [one.stopped for one in children] == [True]


def test_of_two_children_that_are_left_one_stays(children):
    for width in (16, 24):
        trial(times=SLOW, total=100_000, steps=20, runs=9, width=width, prepared=with_factory)[2].close()
    assert [one.stopped for one in children] == [True, False]


@pytest.mark.parametrize("runs", [0, 0.5, -1, float("nan"), float("inf"), True, "12"])
def test_a_number_of_runs_that_cannot_be_is_refused(runs):
    with pytest.raises(ConfigError, match="runs"):
        trial(runs=runs)


def test_a_number_of_runs_that_no_float_holds_is_taken_as_very_many():
    model = torch.nn.Linear(2, 1)
    with hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.5), runs=10**400) as loop:
        assert loop.context.runs == 1e12


def test_the_second_run_expects_a_capture_to_take_what_the_first_took(monkeypatch):
    offered, known = [], history.History.option

    def noting(self, *args):
        offered.append(known(self, *args))
        return offered[-1]

    monkeypatch.setattr(history.History, "option", noting)
    monkeypatch.setattr(states.Preparing, "spent", 0.125)
    with hotloop.testing.captured_step_emulation():
        trial()
        offered.clear()
        trial(rate=2**-7)
    assert {one.prepare_seconds for one in offered if one is not None and one.tier == "eager+graph"} == {0.125}


def test_a_known_tier_that_is_not_switched_to_is_left_after_its_proof(monkeypatch):
    """Proving aims at the tier: where `decide` then stays, steps must not run on in it, untimed and told as eager."""
    with hotloop.testing.captured_step_emulation():
        trial()
        decide, known, proven = auto.decide, auto.Auto.proven, []

        def stays(standing, options):
            decision = decide(standing, options)
            return dataclasses.replace(decision, action="stay") if proven else decision

        def notes(self, tier):
            proven.append(tier)
            return known(self, tier)

        monkeypatch.setattr(auto, "decide", stays)
        monkeypatch.setattr(auto.Auto, "proven", notes)
        loop = trial(rate=2**-7)[2]
    assert any("eager+graph: proven in" in line for line in decisions(loop))
    assert loop.tier.name == loop.policy.in_force.name == "eager"
    assert loop.last_ran() == ("eager", "run")
    assert eager_steps(loop) >= 40
