"""Other threads of the process: loaders that draw from the streams that a step could draw from, and other trainings."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import threading
import time

import numpy as np
import pytest
import torch
from step_failures import Failure, Plan, planted
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch.random_state import PYTHON
from hotloop._torch.thread_patch import called_here
from hotloop.step.audit import auditor
from hotloop.step.ranks import threads
from hotloop.step.state import program as step_program
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.snapshot import Snapshot
from hotloop.testing import captured_step_emulation


@pytest.fixture(autouse=True)
def _captured_steps():
    with captured_step_emulation():
        yield


class Program:
    """A model without dropout, and batches from a generator of its own."""

    def __init__(self, run=None, *, seed=0, noise=lambda: 0.0, **settings):
        self.draws = torch.Generator().manual_seed(seed)
        self.model, self.noise = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), noise
        with torch.no_grad():
            for one in self.model.parameters():
                one.copy_(torch.randn(one.shape, generator=self.draws) / 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.loop = hotloop.Loop(self.model, self.optimizer, run=run, **settings) if run else None
        self.step = self.loop.step(self.train_step) if run else self.train_step

    def train_step(self, x, y):
        loss = F.cross_entropy(self.model(x), y) * (1 + self.noise())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def batch(self):
        return torch.randn(16, 8, generator=self.draws), torch.randint(4, (16,), generator=self.draws)

    def train(self, steps=24):
        for _ in range(steps):
            self.step(*self.batch())
        return [one.detach().clone() for one in self.model.parameters()]


@contextlib.contextmanager
def drawing(draw):
    """Have another thread draw again and again, as one that augments the batches to come."""
    began, ends = threading.Event(), threading.Event()

    def draws():
        while not ends.is_set():
            draw()
            began.set()
            time.sleep(0)

    thread = threading.Thread(target=draws)
    thread.start()
    try:
        began.wait(300)
        yield
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager", "aot_eager+graph"])
def test_a_loader_thread_that_draws_keeps_no_tier_from_being_proven(run):
    """Nor does it stop one later: the sentinel compares every few steps."""
    program = Program(run, sentinel=1.0)
    with drawing(lambda: torch.rand(1)):
        program.train(60)
    assert program.loop.status().tier == run, program.loop.status()
    assert not [one.why for one in program.loop.status().tiers if one.name == run and one.why]


STREAMS = {"numpy.random": np.random.rand, "Python's random": random.random}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("run", ["eager+graph", "aot_eager"])
def test_a_thread_that_draws_from_a_hosts_stream_is_taken_for_the_step_and_the_message_says_so(run, stream):
    """Nobody hears who draws there."""
    program = Program(run)
    with drawing(STREAMS[stream]):
        program.train()
    (declined,) = [one.why for one in program.loop.status().tiers if one.name == run and one.why]
    assert stream in declined
    assert "another thread" in declined
    assert program.loop.status().tier == "eager"


def test_a_step_that_draws_beside_such_a_thread_is_found():
    program = Program("eager+graph", noise=random.random)
    with drawing(random.random):
        program.train()
    (declined,) = [one.why for one in program.loop.status().tiers if one.name == "eager+graph" and one.why]
    assert "the step draws from Python's random" in declined


def test_a_step_that_draws_in_some_calls_only_is_found_beside_such_a_thread():
    """By the proof, whose runs are looked at once another thread was seen to draw."""
    calls = []

    def noise():
        calls.append(1)
        return 0.0 * random.random() if len(calls) > 3 else 0.0

    program = Program("eager+graph", noise=noise)
    program.loop.not_watched = (calls,)
    with drawing(random.random):
        program.train()
    assert program.loop.status().tier == "eager"


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager"])
def test_two_loops_in_two_threads_train_as_eager_say_why_and_go_on_once_alone(run, monkeypatch, caplog):
    monkeypatch.setattr(threads, "_RECENTLY", 60.0)
    expected = [Program(seed=seed).train(60) for seed in range(2)]
    programs = [Program(run, seed=seed) for seed in range(2)]
    together = threading.Barrier(2, timeout=900)

    def train(program):
        for _ in range(60):
            together.wait()  # at every step: on a busy host one would be done before the other begins
            program.step(*program.batch())
        return [one.detach().clone() for one in program.model.parameters()]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(train, programs))
        status = programs[0].loop.status()
        monkeypatch.setattr(threads, "_RECENTLY", 0.0)  # both threads are alive still, and idle
        programs[0].train()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert "another thread of this process trains at the same time" in caplog.text
    assert status.tier == "eager"
    assert "another thread of this process trains" in " ".join(one.why for one in status.tiers)
    assert programs[0].loop.status().tier == run


def test_a_plain_training_in_another_thread_is_noticed_by_its_optimizer(monkeypatch):
    """One whose optimizer steps while a step is looked at."""
    other, ends, stepped = Program(), threading.Event(), threading.Semaphore(0)

    def trains():
        while not ends.is_set():
            other.step(*other.batch())
            stepped.release()

    def survey(*args):
        while stepped.acquire(blocking=False):  # those before
            pass
        found = looking_at(*args)
        for _ in range(2):  # a whole one since: the first that ends may have stepped its optimizer before
            stepped.acquire(timeout=900)
        return found

    looking_at = auditor.trace_step
    monkeypatch.setattr(threads, "_RECENTLY", 60.0)
    thread = threading.Thread(target=trains)
    thread.start()
    program = Program("eager+graph")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(auditor, "trace_step", survey)
            program.train()
        status = program.loop.status()
    finally:
        ends.set()
        thread.join()
    assert status.tier == "eager"
    assert "another thread of this process trains" in " ".join(one.why for one in status.tiers)
    program.train()
    assert program.loop.status().tier == "eager+graph"


def test_steps_of_one_loop_may_be_called_in_one_thread_after_the_other():
    program, seen = Program("eager+graph"), set()
    both = threading.Barrier(2)

    def step(batch):
        seen.add(threading.get_ident())
        program.step(*batch)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: both.wait(), range(2)))
        for _ in range(24):
            pool.submit(step, program.batch()).result()
            pool.submit(int).result()  # so that the next step is another thread's
    assert len(seen) == 2
    assert program.loop.status().tier == "eager+graph"


def test_a_thread_that_trained_before_is_not_taken_to_train_now():
    thread = threading.Thread(target=lambda: Program("eager+graph").train())
    thread.start()
    thread.join()
    program = Program("eager+graph")
    program.train()
    assert program.loop.status().tier == "eager+graph"


def test_a_hook_of_the_process_tells_this_thread_and_its_backwards_from_others():
    here, elsewhere = [], []
    with called_here(here.append, elsewhere.append) as hook:
        hook(1)
        thread = threading.Thread(target=hook, args=(2,))
        thread.start()
        thread.join()
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: hook(3))
        x.sum().backward()
    hook(4)
    assert here == [1, 3]
    assert elsewhere == [2, 4]


def test_a_proof_leaves_a_stream_that_another_thread_draws_from_where_it_is():
    """Put back, the thread would draw the same numbers again."""
    found = []
    program = Program("aot_eager", sentinel=1.0)
    program.train(3)  # looked at by then
    with drawing(lambda: found.append((random.getrandbits(60), int(torch.randint(2**60, ()))))):
        program.train(60)
    assert program.loop.status().tier == "aot_eager"
    for drawn in zip(*found, strict=True):
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("own", [True, False])
def test_a_step_that_failed_leaves_a_stream_that_only_another_thread_draws_from_where_it_is(own):
    """Set back, that thread would draw the same numbers again. What the step draws from itself goes back."""
    program = step_program.Program(lambda: None, Holdings({}, {}), torch.device("cpu"), lambda: False)
    program.rng_usage.note({PYTHON} if own else set())
    start, drew = Snapshot(program, everything=False), []
    start.save(gradients=True)
    with drawing(lambda: drew.append(random.getrandbits(60))):
        pass
    with drawing(lambda: None):
        start.restore()
    with drawing(lambda: drew.append(random.getrandbits(60))):
        pass
    assert (len(set(drew)) == len(drew)) is not own


def test_a_failed_step_runs_eager_beside_a_thread_that_draws():
    """What the thread draws while the step fails is drawn once."""
    drew, plan = [], Plan(Failure("forward kernel", step=12))
    with planted(plan):
        program = Program("aot_eager", sentinel=0)
        for number in range(14):
            plan.begin(number)
            with drawing(lambda: drew.append(random.getrandbits(60))) if number == 12 else contextlib.nullcontext():
                program.step(*program.batch())
    assert plan.fired
    assert program.loop.last_ran()[0] == "eager"
    assert len(set(drew)) == len(drew)
