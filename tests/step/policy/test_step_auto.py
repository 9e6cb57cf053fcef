"""run="auto": what is decided, from times that the test sets, and that training is eager's whatever is decided."""

import re
import time

import pytest
import torch
from torch import nn

import hotloop
from hotloop.cache import BackgroundUnavailableError, Done, Failed
from hotloop.decide import Facts
from hotloop.measure import Timing
from hotloop.step import compiled, tiers
from hotloop.step.loop.transitions import Transitions
from hotloop.step.obstacle import Obstacle
from hotloop.step.policy import auto, background_tiers, history, states
from hotloop.step.policy.policy import SetTier
from hotloop.step.state import memory_limit

TIMES = {"eager": 0.010, "eager+graph": 0.002, "full": 0.009, "full+graph": 0.0018, "as-given": 0.010}


class Clock:
    """A clock on which a step takes what the test says its tier takes; the preparation is free."""

    def __init__(self, loop_kinds, times):
        self.kinds, self.times, self.dropped, self.stopped = loop_kinds, times, 0, 0

    def start(self, *, alone=False):
        return None

    def stop(self, mark):
        self.stopped += 1

    def cancel(self, mark):
        pass

    def take(self):
        found, self.stopped = self.stopped, 0
        ran = [entry.tier for entry in list(self.kinds)[:found]]
        return [Timing(self.times[tier], 0.9 * self.times[tier]) for tier in ran]


class References(Clock):
    def take(self):
        found, self.stopped = self.stopped, 0
        return [Timing(self.times[ran.tier], self.times[ran.tier]) for ran in list(self.kinds)[:found]]


def planted(loop, times):
    """Have a loop's clocks say what the test sets."""
    loop.stepping.times.clock = Clock(loop.stepping.times.what, times)
    loop.stepping.reference_times.clock = References(loop.stepping.reference_times.what, times)


@pytest.fixture(autouse=True)
def _no_store(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.25), nn.GELU(), nn.Linear(16, 1))


def train(run, steps, times=TIMES, total=None, prepared=None, **more):
    """Train for some steps; gives losses, the model and the loop."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total, **more)
    planted(loop, times)
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
    return losses, model, loop


def assert_same(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert all(
        torch.equal(a, b) for a, b in zip(ours[1].state_dict().values(), theirs[1].state_dict().values(), strict=True)
    )


def reasons(loop):
    return [entry["reason"] for entry in loop.record.document["decisions"]]


def test_the_caches_of_proofs_are_given_back_once_the_trial_is_over(monkeypatch):
    """Its turns run eager as well, in what the proofs have left."""
    given = []

    def gives(self, _device):
        given.append(loops[0].policy.trial)
        self.proved = False

    loops = []
    monkeypatch.setattr(memory_limit.Room, "give_back", gives)
    with hotloop.testing.captured_step_emulation():
        train("auto", 120, total=50_000, prepared=loops.append, sentinel=0)
    assert loops[0].tier.name == "eager+graph"
    assert given == [None]


def test_a_launch_bound_step_is_captured_and_training_is_eagers():
    eager = train("eager", 120)
    with hotloop.testing.captured_step_emulation():
        ours = train("auto", 120, total=50_000)
        status = ours[2].status()
    assert status.tier == "eager+graph"
    assert status.seconds_saved > 0
    said = reasons(ours[2])
    assert re.match(r"eager\+graph: .* to prepare and prove, saves .* a step .*pays after .* steps left", said[0])
    assert any("eager+graph against eager: faster" in line for line in said)
    assert_same(ours, eager)


def test_a_tier_that_turns_out_slower_is_left_again():
    with hotloop.testing.captured_step_emulation():
        ours = train("auto", 200, {**TIMES, "eager+graph": 0.0105}, total=50_000)
        assert ours[2].status().tier == "eager"
    assert any("no faster" in line for line in reasons(ours[2]))
    assert_same(ours, train("eager", 200))


def test_a_short_run_stays_eager_and_says_why():
    ours = train("auto", 30, total=30)
    assert ours[2].status().tier == "eager"
    assert re.search(r"eager stays .*does not pay within the .* steps left", reasons(ours[2])[0])


def test_a_tier_that_becomes_slower_is_compared_again_and_left(monkeypatch):
    given = []
    monkeypatch.setattr(
        memory_limit.Room, "give_back", lambda self, _: given.append(1) or setattr(self, "proved", False)
    )
    times = dict(TIMES)
    with hotloop.testing.captured_step_emulation():
        _, model, loop = train("auto", 60, times, total=1_000_000, sentinel=0)
        assert (loop.status().tier, len(given)) == ("eager+graph", 1)
        times["eager+graph"] = 0.015
        step = next(iter(loop._runners))
        generator = torch.Generator().manual_seed(3)
        for _ in range(2_000):
            loop.stepping.run(step, (torch.randn(4, 8, generator=generator),), {})
            if loop.status().tier == "eager" and len(given) > 1:
                break
        assert (loop.status().tier, len(given)) == ("eager", 2)  # the trial's caches, too


def test_a_declined_capture_leaves_auto_eager_with_the_cause():
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="auto", total_steps=100_000)
        planted(loop, TIMES)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            if loss.item() > 1e9:
                raise AssertionError
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(60):
            step(torch.randn(4, 8))
        status = loop.status()
    assert status.tier == "eager"
    declined = next(tier for tier in status.tiers if tier.name == "eager+graph")
    assert declined.state == "declined"
    assert "if loss.item() > 1e9:" in declined.why


def test_code_in_force_that_fails_while_its_graph_is_prepared_is_left():
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 3)
        policy = loop.policy
        policy.in_force = tiers.parse("full")
        policy.candidates.proven.add("full")
        policy.state = states.Preparing(tiers.parse("full+graph"), 0.01)
        loop.transitions.apply([SetTier(policy.state.tier, "try")])
        loop.transitions.apply(policy.failed(tiers.parse("full"), Obstacle("it raised", "mend it")))
    assert loop.tier == policy.in_force == tiers.parse("eager")
    assert isinstance(policy.state, states.Settled)


def test_tiers_that_the_tier_in_force_has_beaten_are_on_offer_again_once_it_is_left():
    """The captured step stayed rejected for good: its run ended in eager, which takes twice as long."""
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 3)
        policy = loop.policy
        policy.in_force = tiers.parse("full+graph")
        policy.speeds.reject("eager+graph", 1_000)
        loop.transitions.apply(policy.failed(policy.in_force, Obstacle("it raised", "mend it")))
    assert policy.in_force == tiers.parse("eager")
    assert policy.speeds.rejected_at("eager+graph") is None


class Child:
    """A child that compiles for three looks, and ends as the test says."""

    outcome = None
    started = []

    def __init__(self):
        self.looks = 0

    @classmethod
    def start(cls, factory, settings, **limits):
        cls.started.append((factory, settings, limits))
        return cls()

    def poll(self):
        self.looks += 1
        return "running" if self.looks < 3 else self.outcome

    def stop(self):
        pass


def done(seconds=5.0):
    return Done(seconds=seconds, compile_seconds=4.0, graphs=1, cache_misses=1, state="compiled", causes=())


@pytest.fixture
def child(monkeypatch):
    kind = type("OneChild", (Child,), {"started": [], "outcome": done()})
    monkeypatch.setattr(background_tiers, "BackgroundCompile", kind)
    return kind


def with_factory(loop):
    """Let a child be possible: this module can make the program of these tests anew."""
    object.__setattr__(loop.context, "workload", f"{__file__}:made")
    loop.policy.background.unavailable = ""


def test_a_background_compile_that_fails_is_a_declined_tier_with_its_reason(child):
    child.outcome = Failed("the child ran out of memory")
    ours = train("auto", 80, {**TIMES, "eager": 1.0, "full": 0.4}, total=1_000_000, prepared=with_factory)
    assert child.started
    status = ours[2].status()
    assert status.tier == "eager"
    assert "full" in ours[2].policy.candidates.declined
    assert_same(ours, train("eager", 80))


@pytest.mark.campaign
@pytest.mark.inductor
def test_a_program_that_does_not_run_in_the_child_is_compiled_in_the_foreground(child):
    """A custom operator that the main script registers is not there in the child, say."""
    child.outcome = Failed("AttributeError: '_OpNamespace' 'mine' object has no attribute 'twice'", unable=True)
    ours = train("auto", 80, {**TIMES, "eager": 1.0, "full": 0.4}, total=1_000_000, prepared=with_factory)
    assert child.started
    assert f"background unavailable: {child.outcome.reason}" in ours[2].status().decisions
    assert "full" not in ours[2].policy.candidates.declined
    assert ours[2].status().tier == "full"


@pytest.mark.inductor
def test_a_background_compile_that_cannot_start_says_so_and_training_goes_on(child, caplog):
    def refuse(factory, settings, **limits):
        raise BackgroundUnavailableError("class Net lives in __main__")

    child.start = staticmethod(refuse)
    with caplog.at_level("INFO", logger="hotloop"):
        ours = train("auto", 40, {**TIMES, "eager": 1.0, "full": 0.4}, total=1_000_000, prepared=with_factory)
    assert "background unavailable: class Net lives in __main__" in caplog.text
    assert "background unavailable: class Net lives in __main__" in ours[2].status().decisions
    assert ours[2].status().tier == "full"  # it pays in the foreground as well
    for ours_now, eagers in zip(ours[0], train("eager", 40)[0], strict=True):
        torch.testing.assert_close(ours_now, eagers, rtol=1e-3, atol=1e-5)


def test_the_child_is_asked_for_what_the_swap_puts_on(child, monkeypatch):
    """The child begins before the survey, which tells that the model draws random numbers."""
    put_on = []

    def note(model, **settings):
        put_on.append(settings)
        return hotloop.compile(model, "aot_eager")

    monkeypatch.setattr(compiled, "compile_in_place", note)
    train("auto", 60, {**TIMES, "eager": 1.0, "full": 0.4}, total=1_000_000, prepared=with_factory)
    assert put_on == [child.started[0][1]]
    assert put_on[0]["preset"].options == {"fallback_random": True}


@pytest.mark.campaign
@pytest.mark.inductor
def test_the_swap_finds_all_that_the_child_compiled(tmp_path, monkeypatch):
    """The model draws random numbers, which the loop learns from a survey: after the child has begun."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    program = made()
    with hotloop.Loop(program.model, program.optimizer, run="auto", total_steps=1_000_000) as loop:
        planted(loop, {**TIMES, "eager": 1.0, "full": 0.4})
        with_factory(loop)
        step = loop.step(program.step)
        end = time.monotonic() + 900  # the child gives way to all that runs beside it
        while loop.tier.name == "eager" and time.monotonic() < end:
            step(torch.randn(4, 8))
            time.sleep(0.05 if loop.policy.background.tier else 0)
        step(torch.randn(4, 8))
        assert any(line.startswith("full: compiled in the background") for line in loop.status().decisions)
        found = loop.context.compiled.status().components["model"]
    assert (found.running, found.state, found.cache_misses) == ("default", "compiled", 0)
    assert found.cache_hits > 0


def test_the_child_is_stopped_with_the_loop(child):
    child.outcome = "running"
    stopped = []
    child.stop = lambda self: stopped.append(True)
    ours = train("auto", 40, {**TIMES, "eager": 1.0, "full": 0.4}, total=1_000_000, prepared=with_factory)
    assert child.started
    ours[2].close()
    assert stopped


def test_earlier_costs_are_used_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path))
    with hotloop.testing.captured_step_emulation():
        quick = {name: seconds / 100 for name, seconds in TIMES.items()}  # so that the preparation took some time
        first = train("auto", 60, quick, total=5_000_000)
        assert first[2].status().tier == "eager+graph"
        assert list(tmp_path.glob("*.json"))
        history.forget()  # as in another process
        second = train("auto", 60, quick, total=5_000_000)
    assert any("as in earlier runs" in line for line in reasons(second[2]))


def made():
    """Return this program as a factory makes it."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, [torch.randn(4, 8)])


def stepping(model=None, total_steps=50_000):
    """Give a loop that chooses, and its step."""
    model = build() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    loop = hotloop.Loop(model, optimizer, run="auto", total_steps=total_steps)
    planted(loop, TIMES)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return loop, step


@pytest.mark.parametrize(("spent", "left"), [(0.0, 35.0), (10.0, 25.0), (60.0, 60.0)])
def test_what_a_child_compiles_is_offered_with_what_is_left_of_it(monkeypatch, spent, left):
    """One that is late is taken to need as long again."""
    loop, _ = stepping()
    with_factory(loop)
    background = loop.policy.background
    background.program.child = history.Child(None, "full", 1_000.0, None)
    monkeypatch.setattr(time, "monotonic", lambda: 1_000.0 + spent)
    (offer,) = background.options("full", Facts(device="cpu", eager_seconds=0.1), None)
    assert offer.background_seconds == left


def test_a_child_that_is_late_says_that_the_program_compiles_slowly(child, monkeypatch):
    """A UNet's child took 131 s, not 35, so a compile in the foreground seemed a tenth of that, and took 189 s."""
    loop, _ = stepping()
    background, now = loop.policy.background, [1_000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with_factory(loop)
    loop.policy.speeds.see("eager", 0.1)

    def in_the_foreground():
        offers = loop.policy.candidates.options("eager")
        return next(one for one in offers if one.tier == "full" and one.background_seconds is None).prepare_seconds

    background.start(tiers.parse("regional"), None, 35.0)
    assert (background.slower, in_the_foreground()) == (1.0, 30.0)
    now[0] += 70.0
    assert (background.slower, in_the_foreground()) == (2.0, 60.0)
    now[0] += 35.0
    child.outcome = done(seconds=105.0)
    while not background.ended():
        pass
    assert background.slower == 3.0
    background.start(tiers.parse("full"), None, 60.0)  # expected with what the first child told
    now[0] += 30.0
    assert background.slower == 3.0
    now[0] += 50.0
    assert background.slower == 4.0


def test_no_two_calls_alike_gives_the_try_up(monkeypatch):
    monkeypatch.setattr(auto, "_GIVE_UP_STEPS", 16)
    with hotloop.testing.captured_step_emulation():
        loop, step = stepping(nn.Linear(1, 1), total_steps=100_000)
        for size in range(1, 80):
            step(torch.randn(size, 1))
        assert loop.status().tier == "eager"
        assert "eager+graph" in loop.policy.candidates.declined


def spending(monkeypatch, *seconds):
    """Have a preparation seem to have taken so long before each of its steps."""

    def spent(self):
        return ([0.0, *seconds])[min(self.steps, len(seconds))]

    monkeypatch.setattr(states.Preparing, "spent", property(spent))


def test_a_preparation_that_would_cost_more_than_may_be_lost_is_given_up(monkeypatch):
    """400 steps of 10 ms: 1.08 s may be lost."""
    spending(monkeypatch, 0.0, 1.02, 1.05, 1.1)
    with hotloop.testing.captured_step_emulation():
        ours = train("auto", 40, total=400)
    status = ours[2].status()
    assert status.tier == "eager"
    assert any(line.startswith("eager+graph given up: it took 1.10 s") for line in status.decisions)
    assert not any("eager+graph would" in line for line in status.decisions[1:])
    assert all(one.recording is None for one in ours[2]._runners[0].capturing._kinds["eager"].values())
    assert_same(ours, train("eager", 40))


def test_once_a_recording_was_replayed_what_it_saves_allows_for_the_rest(monkeypatch):
    spending(monkeypatch, 0.0, 0.3, 0.6, 0.8, 1.0, 2.4)
    proof_saves = auto.Auto.proof_saves
    monkeypatch.setattr(auto.Auto, "proof_saves", lambda self, *_: proof_saves(self, 0.008, "eager"))
    with hotloop.testing.captured_step_emulation():
        ours = train("auto", 40, total=400)
    assert ours[2].status().tier == "eager+graph"
    assert_same(ours, train("eager", 40))


def test_an_open_run_gives_no_preparation_up_for_what_it_cost(monkeypatch):
    spending(monkeypatch, 0.0, 0.3, 0.6, 5.0)
    with hotloop.testing.captured_step_emulation():
        ours = train("auto", 60)
    assert not any("given up" in line for line in reasons(ours[2]))


def test_two_eager_steps_begin_on_an_idle_device_and_tell_whether_launches_hold_it_up(monkeypatch):
    begun = []
    monkeypatch.setattr(Clock, "start", lambda _self, *, alone: begun.append(alone))
    _, _, loop = train("auto", 8, total=400)
    assert [step for step, one in enumerate(begun) if one] == [3, 4]
    assert loop.policy.candidates.host_shares == [pytest.approx(0.9)] * 2


def test_auto_closes_to_eager_and_the_record_is_finished():
    with hotloop.testing.captured_step_emulation():
        losses, model, loop = train("auto", 40, total=50_000)
        with loop:
            pass
        assert loop.record.document["status"] == "finished"
    assert loop.bypassed


def test_every_step_is_timed_until_something_is_decided_and_one_in_eight_from_then_on():
    _, _, loop = train("auto", 90, total=90)
    steps = [entry["step"] for entry in loop.record.document["steps"]]
    assert steps[:9] == list(range(1, 10))
    assert len(steps) < 40
    assert loop.status().step == 90


def test_a_child_is_told_what_the_step_needs_and_not_what_proofs_needed(child, monkeypatch):
    needed = [7]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: needed[0])
    loop, _ = stepping()
    with_factory(loop)
    object.__setattr__(loop.context, "device", torch.device("cuda"))
    loop.policy.background.note_peak()
    needed[0] = 50  # a proof
    loop.policy.background.note_peak()
    loop.policy.background.start(tiers.parse("full"), None, None)
    assert child.started[-1][2]["peak_bytes"] == 7


def test_of_several_kinds_of_calls_one_is_captured_before_another_is_begun():
    with hotloop.testing.captured_step_emulation():
        loop, step = stepping()
        begun = set()
        for number in range(80):
            step(torch.randn((4, 6, 8)[number % 3], 8))
            if loop.policy.preparing:
                begun |= {one.key for one in loop._runners[0].capturing.kinds.values() if one.begun}
        assert len(begun) == 1
        assert sum(one.proven for one in loop._runners[0].capturing.kinds.values()) == 3
        assert loop.status().tier == "eager+graph"


def test_a_kind_of_call_that_does_not_come_back_holds_nobody_up():
    """12 steps of one size, then another for good, as a curriculum does."""
    with hotloop.testing.captured_step_emulation():
        loop, step = stepping()
        for number in range(80):
            step(torch.randn(4 if number < 12 else 6, 8))
        assert loop.status().tier == "eager+graph"


def test_what_a_tier_needs_imported_is_part_of_its_cost(monkeypatch):
    set_tier = Transitions.set_tier

    def slowly(self, tier, reason):
        time.sleep(0.2 if tier.graph else 0.0)
        set_tier(self, tier, reason)

    monkeypatch.setattr(Transitions, "set_tier", slowly)
    with hotloop.testing.captured_step_emulation():
        loop = train("auto", 10, total=50_000)[2]
        assert loop.policy.preparing
        assert loop.policy.state.spent >= 0.2
