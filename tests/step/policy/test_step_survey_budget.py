"""What surveys may cost under run="auto": predicted, stopped in the middle, and not made again in vain."""

import itertools
import time
import types

import pytest
import torch
from test_step_auto import build, planted

import hotloop
from hotloop.decide import Facts, expect
from hotloop.step.audit.op_trace import OpTrace
from hotloop.step.policy import history, process_history, states

TIMES = {"eager": 0.010, "eager+graph": 0.002}


@pytest.fixture(autouse=True)
def store(monkeypatch, tmp_path):
    """A store of costs, and a process that has trained nothing yet."""
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path))
    process_history.forget()
    yield
    process_history.forget()


@pytest.fixture
def ticking(monkeypatch):
    """Sets a clock of preparations that goes on by so many seconds whenever it is asked; no Python of it is heard."""

    def set_clock(tick):
        clock = types.SimpleNamespace(perf_counter=itertools.count(0.0, tick).__next__, monotonic=time.monotonic)
        monkeypatch.setattr(states, "time", clock)

    return set_clock


@pytest.fixture
def observed(monkeypatch):
    """Counts the operations that surveys look at."""
    found = []
    real = OpTrace._after
    monkeypatch.setattr(OpTrace, "_after", lambda look, *given: (found.append(look), real(look, *given))[1])
    return found


def reading(total, steps=60):
    """Train with a step that no capture allows; gives the loop and its surveys."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    ran = []
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="auto", total_steps=total)
        planted(loop, TIMES)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return torch.tensor(loss.item())

        for _ in range(steps):
            step(torch.ones(4, 8))
            ran.append(loop.last_ran()[1])
        status = loop.status()
        loop.close()
    return loop, ran.count("survey"), status


def said(loop):
    return [entry["reason"] for entry in loop.record.document["decisions"]]


def test_the_next_run_makes_no_survey_that_ended_in_a_decline(ticking, monkeypatch):
    ticking(0.01)
    monkeypatch.setattr(history, "_IN_VAIN_SHARE", 1e-6)  # of 500 s
    first, surveys, _ = reading(50_000)
    assert surveys == 1
    process_history.forget()
    again, surveys, status = reading(50_000)
    assert surveys == 0
    why = next(one.why for one in status.tiers if one.name == "eager+graph")
    assert "ended so in an earlier run: a value is read on the host" in why
    assert any("eager+graph is left alone: a survey of" in line for line in said(again))


def test_a_survey_that_costs_nothing_beside_the_run_is_made_again(ticking, monkeypatch):
    ticking(0.01)
    monkeypatch.setattr(history, "_IN_VAIN_SHARE", 0.5)
    assert reading(50_000)[1] == 1
    process_history.forget()
    assert reading(50_000)[1] == 1


def test_a_survey_is_made_again_once_the_line_that_was_to_blame_is_another(ticking, monkeypatch):
    ticking(0.01)
    monkeypatch.setattr(history, "_IN_VAIN_SHARE", 1e-6)
    assert reading(50_000)[1] == 1
    process_history.forget()
    changed = types.SimpleNamespace(getline=lambda file, line: "return loss.detach()\n")
    monkeypatch.setattr(history, "linecache", changed)
    assert reading(50_000)[1] == 1


def test_a_decline_after_a_proof_is_no_surveys(ticking):
    """Only what surveys alone have found is known before the next run's."""
    ticking(1.0)
    preparation = states.Preparing(types.SimpleNamespace(name="eager+graph"), 0.0)
    for doing, alone in (("survey", True), ("run", True), ("proof", False)):
        preparation.begin_step()
        preparation.end_step(doing)
        assert preparation.only_surveyed is alone
    assert 0 < preparation.surveyed_seconds < preparation.spent


def test_a_survey_is_expected_to_cost_what_it_cost_before_or_what_the_host_has_to_do():
    facts = {"device": "cuda", "eager_seconds": 0.1}
    usual = expect("eager+graph", Facts(**facts))
    known = expect("eager+graph", Facts(**facts, survey_seconds=5.0))
    busy = expect("eager+graph", Facts(**facts, host_seconds=0.1))
    assert known.prepare_seconds == 5.0
    assert known.prepare_worst_seconds == pytest.approx(5.5)
    assert busy.prepare_seconds == pytest.approx(1.0)
    assert busy.prepare_worst_seconds == pytest.approx(2.0)
    assert usual.prepare_seconds < busy.prepare_seconds
    assert expect("eager+graph", Facts(**facts, host_seconds=0.01)) == usual  # it is in the table's figures


def test_a_survey_is_made_again_in_some_later_run_though_the_line_stays_where_a_switch_elsewhere_is_turned(
    ticking, monkeypatch
):
    """The remedies that declines name are such switches: ``layerdrop=0``, a log that is off. No key holds these."""
    ticking(0.01)
    monkeypatch.setattr(history, "_IN_VAIN_SHARE", 1e-6)
    switch = types.SimpleNamespace(logs=True)

    def trained():
        process_history.forget()
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        with hotloop.testing.captured_step_emulation():
            loop = hotloop.Loop(model, optimizer, run="auto", total_steps=50_000)
            planted(loop, TIMES)

            @loop.step
            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return torch.tensor(loss.item()) if switch.logs else loss.detach()

            for _ in range(80):
                step(torch.ones(4, 8))
            with loop:
                return loop.status().tier

    assert trained() == "eager"
    switch.logs = False
    assert "eager+graph" in [trained() for _ in range(4)]
