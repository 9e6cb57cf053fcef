"""Processes under ``run="auto"``: run as ``python auto_program.py STORE RANK SIZE SCENARIO...``.

The times that the policy hears of are planted, so that its verdicts do not hang on the machine: milliseconds a step by
tier, which may differ between the processes. All else is real. `captured_program` has what trains.
"""

import contextlib
import os
import time
from unittest import mock

import torch
from captured_program import (
    CAPTURES,
    RANK,
    SIZE,
    STEPS,
    Net,
    comes_late,
    impatient,
    main,
    no_sync_but_each,
    train,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hotloop
from hotloop.errors import StepLostError
from hotloop.measure import Timing
from hotloop.step.capture.in_and_out import Inputs
from hotloop.step.loop import deciding
from hotloop.step.loop.capturing import Capturing
from hotloop.step.policy.agreed_auto import AgreedAuto, AgreedCandidates
from hotloop.step.policy.auto import Auto
from hotloop.step.policy.candidates import Candidates
from hotloop.step.policy.states import Preparing
from hotloop.step.prove.schedule import SHARE, Schedule
from hotloop.step.state import trial_run
from hotloop.testing.captured import Tape, TapeRecording

TOTAL = 1_000_000
"""Steps that the loop is told of: a capture then pays, and may take minutes on a busy machine, as that is no planted time."""
FASTER = {"eager": 10.0, "eager+graph": 5.0}
LETTERS = {"eager": "e", "eager+graph": "g", "regional": "r", "regional+graph": "R", "full": "f", "full+graph": "F"}


@contextlib.contextmanager
def paced(*by_rank):
    """Let steps take so many milliseconds by tier, in each process; the last one's for all further processes.

    Tiers without a time are not tried.
    """
    policy = AgreedAuto if SIZE > 1 else Auto
    pace, real = by_rank[min(RANK, len(by_rank) - 1)], policy.timed
    candidates = AgreedCandidates if SIZE > 1 else Candidates
    names = candidates.names

    def timed(self, ran, timing):
        seconds = pace[ran.tier] / 1e3 if ran.kind == "run" else timing.seconds
        return real(self, ran, Timing(seconds, seconds))

    def few(self):
        return [name for name in names(self) if name in pace]

    with mock.patch.object(policy, "timed", timed), mock.patch.object(candidates, "names", few):
        yield


def chosen(*pace, run="auto", total=TOTAL, planted=None, captures=CAPTURES, **how):
    """Train eagerly and by `auto`, or in a tier; return what a test looks at."""
    eager = train("eager", **how)
    with captures(), paced(*(pace or (FASTER,))), planted or contextlib.nullcontext():
        ours = train(run, total=total, **how)
    pairs = [(eager["losses"], ours["losses"]), *((value, ours["left"][name]) for name, value in eager["left"].items())]
    ran = [tier == "eager+graph" for tier, _ in ours["ran"]]
    return {
        "same": all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs),
        "equal": all(torch.equal(one, other) for one, other in pairs),
        "tier": ours["status"].tier,
        "log": "".join(what[0] for _, what in ours["ran"]),
        "graph": "".join("ge"[not one] for one in ran),
        "tiers": "".join(LETTERS[tier] for tier, _ in ours["ran"]),
        "status": " ".join(str(ours["status"]).split()),
        "decided": [" ".join(line.split()) for line in ours["status"].decisions],
    }


def on_rank_1(owner, name, does):
    """Let one process alone do something else."""
    return mock.patch.object(owner, name, does) if RANK == 1 else contextlib.nullcontext()


def unlike():
    """One process's replays leave another value than its step."""
    models, real = [], Tape.replay

    def replay(self):
        real(self)
        with torch.no_grad():
            models[-1].module.first.weight.mul_(1.5)

    return chosen(planted=on_rank_1(Tape, "replay", replay), made=models.append)


def no_memory():
    def snapshot(*args, **kwargs):
        raise torch.OutOfMemoryError("planted")

    return chosen(planted=on_rank_1(trial_run, "Snapshot", snapshot))


def fails_to_capture():
    def cut(self, ready):
        raise RuntimeError("planted: no capture")

    return chosen(planted=on_rank_1(TapeRecording, "cut", cut))


def fails_in_a_replay(at):
    """A replay of one process fails before it has begun: in its so-manieth call."""
    times, real = [], Inputs.fill

    def fill(self, leaves):
        times.append(1)
        if len(times) == at:
            raise RuntimeError("planted: no replay")
        return real(self, leaves)

    return chosen(planted=on_rank_1(Inputs, "fill", fill))


def too_dear():
    return chosen(planted=on_rank_1(Preparing, "too_expensive", lambda *_: True))


def decides_wrongly(at):
    """One process cannot decide any more, from a call on."""
    real = AgreedAuto._decide

    def decide(self):
        if self._calls == at:
            raise RuntimeError("planted: no decision")
        return real(self)

    return chosen(planted=on_rank_1(AgreedAuto, "_decide", decide))


def flaky():
    """An exception that one process catches after the collectives of a step, at each place on the way."""
    told = {}
    for at in (6, 8, 10, 11, 12, 13, 14, 15, 16, 19, 20):  # none of these steps is a replay, which would not raise it
        one = chosen(flaky=at, steps=44)
        told[at] = one["same"], one["tier"]
    return {"same": all(same for same, _ in told.values()), "tiers": sorted({tier for _, tier in told.values()})}


def ends(at, *, hangs=False, sentinel=0.0):
    """One process ends, or hangs, before a step."""

    def between(number, model):
        if (number, RANK) == (at, 1):
            time.sleep(60 if hangs else 0)
            os._exit(9)

    began = time.monotonic()
    with CAPTURES(), paced(FASTER):
        try:
            train("auto", total=TOTAL, between=between, sentinel=sentinel)
        except (StepLostError, RuntimeError) as error:
            return {"raised": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    return {"raised": ""}


def hangs():
    with impatient("hangs"):
        return ends(60, hangs=True)


def ends_in_a_check():
    """One process ends before the second step of a check."""
    steps, real = [], Capturing.prove

    def prove(self, kind, call, tier):
        steps.extend([kind] if kind.checked else [])
        if len(steps) == 2:
            os._exit(9)
        return real(self, kind, call, tier)

    with checked_after(10), on_rank_1(Capturing, "prove", prove):
        return ends(-1, sentinel=SHARE)


def short_batches():
    return chosen(sizes=lambda number: 4 if RANK == 1 and number % 9 == 7 else 6, steps=120)


def drops():
    def between(number, model):
        if number == 60 and RANK == 1:
            model.module.scale = 0.5

    return chosen(between=between, steps=120)


def slowed(pace=FASTER, tier="eager+graph", steps=200):
    """The tier in force becomes slow in one process: it is timed beside eager, and left by all."""
    here = dict(pace)

    def between(number, model):
        here[tier] = 40.0 if number >= 60 and RANK == 1 else 5.0

    return chosen(pace, here, between=between, steps=steps)


def two_steps():
    """Two decorated steps by turns, the second of which one process cannot capture."""

    def trained(run):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop = hotloop.Loop(model, optimizer, run=run, total_steps=TOTAL, sentinel=0)

        def made(reads):
            def step(x):
                loss = model(x).square().mean()
                if reads:
                    float(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return loop.step(step)

        steps, draws = (made(reads=False), made(reads=RANK == 1)), torch.Generator().manual_seed(RANK)
        torch.manual_seed(100 + RANK)
        for number in range(100):
            steps[number % 2](torch.randn(6, 6, generator=draws))
        left, status = torch.cat([value.detach().flatten() for value in model.parameters()]), loop.status()
        loop.close()
        return left, status

    eager, _ = trained("eager")
    with CAPTURES(), paced(FASTER):
        ours, status = trained("auto")
    return {"same": torch.equal(eager, ours), "tier": status.tier, "status": " ".join(str(status).split())}


def resumed():
    """A run goes on from a checkpoint, in which one process had done a step more: it had caught no exception."""

    def trained(run):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loop, ran = hotloop.Loop(model, optimizer, run=run, total_steps=TOTAL, sentinel=0), ""
        loop.load_state_dict({"steps": 500 + RANK})

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        draws = torch.Generator().manual_seed(RANK)
        torch.manual_seed(100 + RANK)
        for _ in range(60):
            step(torch.randn(6, 6, generator=draws))
            ran += "eg"[loop.last_ran()[0] == "eager+graph"]
        left, decided = torch.cat([value.detach().flatten() for value in model.parameters()]), loop.status().decisions
        loop.close()
        return left, ran, list(decided)

    eager, *_ = trained("eager")
    with CAPTURES(), paced(FASTER):
        ours, ran, decided = trained("auto")
    return {"same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6), "graph": ran, "decided": decided}


@contextlib.contextmanager
def checked(distance=(10, 14)):
    """Let each process ask for a check after so many replays, whatever it costs."""
    with checked_after(distance[RANK % 2]):
        yield


@contextlib.contextmanager
def checked_after(replays):
    """Let a look come after exactly so many replays, and a check of values after each look."""
    counted = {}

    def due(self, _step):
        counted[self] = counted.get(self, 0) + 1
        return counted[self] % replays == 0

    with mock.patch.object(Schedule, "due", due), mock.patch.object(deciding, "VALUES_EVERY", 1):
        yield


def goes_wrong(run):
    """A recording of one process goes wrong after it was proven."""
    models, real, replays = [], Tape.replay, []

    def replay(self):
        real(self)
        replays.append(1)
        if len(replays) > 20:
            with torch.no_grad():
                models[-1].module.second.bias.mul_(1.001)

    with on_rank_1(Tape, "replay", replay), checked():
        return chosen(run=run, made=models.append, steps=100, sentinel=SHARE)


def checks(**how):
    with checked():
        return chosen(steps=120, sentinel=SHARE, **how)


def caught_in_a_check():
    """One process catches an exception in a step of a check."""
    with checked_after(20):
        return chosen(run="eager+graph", flaky=36, sentinel=SHARE)


def no_memory_for_a_check():
    real = trial_run.Snapshot

    def snapshot(program):
        if program.holdings.modules and sum(checks_begun):
            raise torch.OutOfMemoryError("planted")
        return real(program)

    checks_begun, real_checked = [], Schedule.checked

    def noted(self, *cost, **how):
        checks_begun.append(1)
        return real_checked(self, *cost, **how)

    with checked_after(20), mock.patch.object(Schedule, "checked", noted):
        return chosen(run="eager+graph", planted=on_rank_1(trial_run, "Snapshot", snapshot), sentinel=SHARE)


def without_a_wrapper():
    """A loop without DistributedDataParallel, in one process alone; and one on a device that captures nothing."""
    told = {}
    if RANK == 0:
        for name, captures in (("no wrapper", CAPTURES), ("no engine", contextlib.nullcontext)):
            with captures():
                model = nn.Linear(4, 4)
                loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), total_steps=TOTAL)
                told[name] = " ".join(loop.status().decisions)
                loop.close()
    return told


WAYS = {
    "plain": chosen,
    # Its kernel takes the learning rate as a recording's does: eager repeats itself bit by bit there.
    "fused": lambda: chosen(by=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)),
    "views": lambda: chosen(wrap={"gradient_as_bucket_view": True}),
    "slower": lambda: chosen(FASTER, {"eager": 10.0, "eager+graph": 20.0}),
    # By its own times the first process would stay, and the second one leave: the greatest times count.
    "slowest": lambda: chosen({"eager": 5.0, "eager+graph": 9.0}, {"eager": 20.0, "eager+graph": 12.0}),
    "short": lambda: chosen(total=TOTAL if RANK else 60),
    "host read": lambda: chosen(inside=lambda out: out.sum().item() if RANK == 1 else None),
    "unlike": unlike,
    "no memory": no_memory,
    "fails to capture": fails_to_capture,
    "fails in a proof": lambda: fails_in_a_replay(1),
    "fails in a trial": lambda: fails_in_a_replay(4),
    "fails in force": lambda: fails_in_a_replay(30),
    "too dear": too_dear,
    "decides wrongly": lambda: decides_wrongly(9),
    "decides wrongly in force": lambda: decides_wrongly(40),
    "accumulated": lambda: chosen(within=lambda number, model: model.no_sync() if number % 2 == 0 else None, steps=120),
    "four": lambda: chosen(within=no_sync_but_each(4), steps=160),
    "flaky": flaky,
    "short batches": short_batches,
    "varying shapes": lambda: chosen(sizes=lambda number: 6 + (number * 2 + RANK) % 90, steps=120),
    "drops": drops,
    "slowed": slowed,
    "two steps": two_steps,
    "unused": lambda: chosen(wrap={"find_unused_parameters": True}),
    "late at first": lambda: comes_late("late at first", 8, chosen),
    "late": lambda: comes_late("late", 50, chosen),
    "uneven": lambda: chosen(joined=True, steps=STEPS if RANK else STEPS - 30),
    "without a wrapper": without_a_wrapper,
    "resumed": resumed,
    "checks": checks,
    "checks of two kinds": lambda: checks(within=lambda number, model: model.no_sync() if number % 2 == 0 else None),
    "goes wrong": lambda: goes_wrong("auto"),
    "goes wrong by name": lambda: goes_wrong("eager+graph"),
    "caught in a check": caught_in_a_check,
    "no memory for a check": no_memory_for_a_check,
    "ends on the way": lambda: ends(14),
    "ends in a trial": lambda: ends(22),
    "ends in force": lambda: ends(60),
    "ends in a check": ends_in_a_check,
    "hangs": hangs,
}

if __name__ == "__main__":
    main(WAYS)
