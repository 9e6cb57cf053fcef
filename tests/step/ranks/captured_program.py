"""Processes whose steps are captured together: run as ``python captured_program.py STORE RANK SIZE SCENARIO...``.

Each scenario trains once eagerly and once with ``+graph`` on the CPU's emulation, and prints JSON of both. With
``PEERS_BACKEND=nccl`` each process has a GPU, which captures.
"""

import contextlib
import datetime as dt
import json
import os
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.errors import ConfigError, StepLostError
from hotloop.step.capture.in_and_out import Inputs
from hotloop.step.ranks import peers as votes
from hotloop.step.state import trial_run
from hotloop.testing import captured_step_emulation
from hotloop.testing.captured import Tape, TapeRecording

warnings.simplefilter("ignore")
STORE, RANK, SIZE, SCENARIOS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
STEPS = 80
_USUAL = 0.005
"""Python's switch interval, in seconds."""
BACKEND = os.environ.get("PEERS_BACKEND", "gloo")
DEVICE = torch.device("cpu") if BACKEND == "gloo" else torch.device("cuda", RANK)
CAPTURES = captured_step_emulation if BACKEND == "gloo" else contextlib.nullcontext


@contextlib.contextmanager
def impatient(scenario):
    """Let votes wait for 8 s only; yields a function that waits until another process has given one up."""
    mark, not_answered = Path(f"{STORE}.{scenario}"), votes.Peers._not_answered

    def noted(self, error):
        why = not_answered(self, error)
        mark.touch()
        return why

    def wait():
        while not mark.exists():
            time.sleep(0.05)

    with mock.patch.object(votes, "VOTE_SECONDS", 8.0), mock.patch.object(votes.Peers, "_not_answered", noted):
        yield wait


def comes_late(scenario, at, trains):
    """Train eagerly and captured; in the second training one process waits before a step until the others gave it up."""
    trainings = []

    def between(number, model):
        if (number, RANK) == (at, 1):
            trainings.append(number)
            if len(trainings) == 2:
                wait()

    with impatient(scenario) as wait:
        return trains(wrap={"broadcast_buffers": False}, between=between)


class FlakyError(Exception):
    """What a program catches: its tracker does not answer, say."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.25)
        self.second, self.scale = nn.Linear(10, 3), 1.0

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu())) * self.scale


class Recomputed(Net):
    """A network that computes its hidden values again in the backward, with the dropout of its forward."""

    def forward(self, x):
        hidden = checkpoint(lambda one: self.drop(self.first(one)).relu(), self.drop(x), use_reentrant=False)
        return self.second(self.drop(self.norm(hidden)))


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(  # a scenario each
    run,
    *,
    wrap=None,
    made=None,
    sizes=None,
    between=None,
    inside=None,
    within=None,
    joined=False,
    flaky=None,
    steps=STEPS,
    total=None,
    by=None,
    net=Net,
    sentinel=0.0,
):
    """Train; return the losses, the state, and the loop's status.

    Args:
        run: a tier.
        wrap: arguments of DistributedDataParallel.
        made: called with the wrapper.
        sizes: returns the number of rows of a step's batch.
        between: called before each step with its number and the model.
        inside: called in each step with the model's output.
        within: returns a context around each call of the step.
        joined: wrap the run in `Join`.
        flaky: the step after whose collectives an exception is raised in one process, and caught.
        steps: how many.
        total: how many the loop is told of; None for as many.
        by: returns the optimizer of some parameters; None for SGD.
        net: makes the model.
        sentinel: the share of time for checks; 0 for none, so that replays can be counted.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(net().to(DEVICE), **(wrap or {}))
    if made is not None:
        made(model)
    optimizer = (by or momentum)(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=total or steps, sentinel=sentinel)

    @loop.step
    def step(x, y, update):
        out = model(x)
        if inside is not None:
            inside(out)
        loss = F.cross_entropy(out, y)
        loss.backward()
        if update:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if sys.getswitchinterval() > _USUAL:  # nothing of the program: no recording is dropped for it
            raise FlakyError
        return loss.detach()

    draws = torch.Generator().manual_seed(RANK)
    torch.manual_seed(100 + RANK)
    losses, ran, rebuilt_in = [], [], []
    with Join([model]) if joined else contextlib.nullcontext():
        for number in range(steps):
            rows = sizes(number) if sizes is not None else 6
            x, y = torch.randn(rows, 6, generator=draws), torch.randint(3, (rows,), generator=draws)
            x, y = x.to(DEVICE), y.to(DEVICE)
            if between is not None:
                between(number, model)
            around = within(number, model) if within is not None else None
            sys.setswitchinterval(2 * _USUAL if (number, RANK) == (flaky, 1) else _USUAL)
            with around or contextlib.nullcontext():
                try:
                    losses.append(step(x, y, update=around is None))
                except FlakyError:
                    losses.append(torch.full((), 7.0, device=DEVICE))
            ran.append(loop.last_ran())
            if model._has_rebuilt_buckets and not rebuilt_in:
                rebuilt_in.append(ran[-1][1])
            schedule.step()
    status = loop.status()
    left = {name: value.clone() for name, value in model.state_dict().items() if RANK == 0 or "running" not in name}
    states = optimizer.state_dict()["state"].items()
    left |= {f"{name} {place}": torch.as_tensor(value) for place, state in states for name, value in state.items()}
    loop.close()
    return {"losses": torch.stack(losses), "left": left, "status": status, "ran": ran, "rebuilt in": rebuilt_in}


def beside_eager(run="eager+graph", **how):
    """Train both ways; return what a test looks at."""
    eager = train("eager", **how)
    with CAPTURES():
        ours = train(run, **how)
    pairs = [(eager["losses"], ours["losses"]), *((value, ours["left"][name]) for name, value in eager["left"].items())]
    ran = [tier for tier, _ in ours["ran"]]
    return {
        "same": all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs),
        "tier": ours["status"].tier,
        "replays": sum((tier, what) == (run, "run") for tier, what in ours["ran"]),
        "last": ran[-1],
        "log": "".join(what[0] for _, what in ours["ran"]),
        "rebuilt in": ours["rebuilt in"],
        "status": str(ours["status"]),
        "decided": list(ours["status"].decisions),
    }


def short_batches():
    """One process has a batch of another size now and then."""
    return beside_eager(sizes=lambda number: 4 if RANK == 1 and number % 9 == 7 else 6)


def varying_shapes():
    """In one process no shapes come twice."""
    return beside_eager(sizes=lambda number: 6 + number * RANK, steps=100)


def drops():
    """One process changes what its recording holds."""

    def between(number, model):
        if number == 40 and RANK == 1:
            model.module.scale = 0.5

    return beside_eager(between=between, steps=120)


def accumulated():
    """Gradients are accumulated without being reduced."""
    return beside_eager(within=lambda number, model: model.no_sync() if number % 2 == 0 else None)


def no_sync_but_each(every):
    """Return what is around a call: gradients are reduced at each so many calls alone."""
    return lambda number, model: None if number % every == every - 1 else model.no_sync()


def flaky():
    """An exception in one process in each step of the way, one training each; no replay raises it."""
    told = {}
    for at in range(10, 16):
        one = beside_eager(flaky=at, steps=28)
        told[at] = one["same"], one["tier"]
    return {"same": all(same for same, _ in told.values()), "tiers": sorted({tier for _, tier in told.values()})}


def hooked():
    """A hook that does something else after some steps."""
    calls = []

    def hook(_state, bucket):
        calls.append(1)
        scale = 1.0 if len(calls) < 50 else 0.25
        work = dist.all_reduce(bucket.buffer().mul_(scale / SIZE), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def made(model):
        calls.clear()
        model.register_comm_hook(None, hook)

    return beside_eager(made=made)


def two_steps(run, first_at, fails_at=None):
    """Train by two decorated steps of one loop, the second one called late; a replay may fail in one process before."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=60, sentinel=0)

    def made(scale):
        def step(x, y):
            loss = scale * F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return loop.step(step)

    one, other, draws = made(1.0), made(0.5), torch.Generator().manual_seed(RANK)
    torch.manual_seed(100 + RANK)
    real, failing, rebuilt_in = Inputs.fill, [False], []

    def fill(self, leaves):
        if failing[0] and RANK == 1:
            raise RuntimeError("planted: no replay")
        return real(self, leaves)

    Inputs.fill = fill
    try:
        for number in range(60):
            failing[0] = number == fails_at
            x, y = torch.randn(6, 6, generator=draws), torch.randint(3, (6,), generator=draws)
            (other if number >= first_at and number % 2 else one)(x.to(DEVICE), y.to(DEVICE))
            if model._has_rebuilt_buckets and not rebuilt_in:
                rebuilt_in.append(loop.last_ran()[1])
    finally:
        Inputs.fill = real
    left, tier = torch.cat([value.detach().flatten() for value in model.parameters()]), loop.status().tier
    loop.close()
    return left, tier, rebuilt_in


def compiled_by_turns():
    """Two steps on the way to compiled code: the first call of the second one is that in which buckets are rebuilt."""
    eager, *_ = two_steps("eager", 0)
    with CAPTURES():
        ours, tier, rebuilt_in = two_steps("aot_eager+graph", 0)
    return {"same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6), "tier": tier, "rebuilt in": rebuilt_in}


def late_step():
    """A second step whose first call comes after the tier failed in one process; and two that are captured by turns."""
    told = {}
    for name, settings in {"late": (45, 40), "by turns": (0,)}.items():
        eager, *_ = two_steps("eager", *settings)
        with CAPTURES():
            ours, tier, _ = two_steps("eager+graph", *settings)
        told[name] = {"same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6), "tier": tier}
    return {"same": all(one["same"] for one in told.values()), "tiers": [one["tier"] for one in told.values()]}


def shared_memory():
    """Two arguments share memory now and then, in one process alone."""

    def trained(run):
        torch.manual_seed(0)
        model = DistributedDataParallel(Net().to(DEVICE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        loop, ran = hotloop.Loop(model, optimizer, run=run, total_steps=60, sentinel=0), []

        @loop.step
        def step(one, other):
            loss = model(one).square().mean() + model.module(other).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        draws = torch.Generator().manual_seed(RANK)
        torch.manual_seed(100 + RANK)
        for number in range(60):
            rows = torch.randn(12, 6, generator=draws).to(DEVICE)
            step(rows[:6], rows[5:11] if RANK == 0 and number % 3 == 0 else rows[6:])
            ran.append(loop.last_ran())
        left = torch.cat([value.detach().flatten() for value in model.parameters()])
        loop.close()
        return left, ran

    eager, _ = trained("eager")
    with CAPTURES():
        ours, ran = trained("eager+graph")
    return {
        "same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6),
        "replays": sum(one == ("eager+graph", "run") for one in ran),
    }


def fails_in_a_backward():
    """The first reduction of a backward is followed by what no capture allows, in all processes."""
    real = Tape.record

    def record(self, operation, args, kwargs):
        result = real(self, operation, args, kwargs)
        if "allreduce_" in str(operation) and not vars(self).setdefault("failed", False):
            self.failed = True
            raise RuntimeError("planted: no capture")
        return result

    Tape.record = record
    try:
        return beside_eager(wrap={"bucket_cap_mb": 0.0001})
    finally:
        Tape.record = real


def no_inputs():
    """One process has no memory for what a recording needs before it begins."""
    real = Inputs.__init__

    def planted(self, *args):
        if RANK == 1:
            raise torch.OutOfMemoryError("planted")
        return real(self, *args)

    Inputs.__init__ = planted
    try:
        return beside_eager()
    finally:
        Inputs.__init__ = real


def host_read():
    """One process reads a value on the host."""
    return beside_eager(inside=lambda out: out.sum().item() if RANK == 1 else None)


def fails_in_a_replay():
    """A replay of one process fails before it has begun."""
    real, times = Inputs.fill, []

    def fill(self, leaves):
        times.append(1)
        if RANK == 1 and len(times) == 30:
            raise RuntimeError("planted: no replay")
        return real(self, leaves)

    Inputs.fill = fill
    try:
        return beside_eager()
    finally:
        Inputs.fill = real


def fails_to_capture(ranks=(1,), why="planted: no capture"):
    """Some processes cannot end their recording."""
    real = TapeRecording.cut

    def cut(self, ready):
        if RANK in ranks:
            raise RuntimeError(why)
        return real(self, ready)

    TapeRecording.cut = cut
    try:
        return beside_eager()
    finally:
        TapeRecording.cut = real


def no_memory():
    """One process has no memory for the copies of a proof."""
    real = trial_run.Snapshot

    def planted(*args, **kwargs):
        if RANK == 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("planted")
        return real(*args, **kwargs)

    trial_run.Snapshot = planted
    try:
        return beside_eager()
    finally:
        trial_run.Snapshot = real


def ends_between():
    """One process ends between two steps that are replayed."""

    def between(number, model):
        if (number, RANK) == (40, 1):
            os._exit(9)

    with CAPTURES():
        try:
            train("eager+graph", between=between)
        except StepLostError as error:
            return {"raised": str(error)}
    return {"raised": ""}


def alone():
    """One process comes to no step any more: the others leave the tier within the time of a vote."""
    return comes_late("alone", 40, beside_eager)


def ends_in_a_capture():
    """One process ends while a step is captured."""
    real = TapeRecording.cut

    def cut(self, ready):
        if RANK == 1:
            os._exit(9)
        return real(self, ready)

    TapeRecording.cut = cut
    with CAPTURES():
        try:
            train("eager+graph")
        except StepLostError as error:
            return {"raised": str(error)}
    return {"raised": ""}


def adversaries():
    """A discriminator and a generator, which steps in each third turn alone."""

    def trained(run):
        torch.manual_seed(0)
        nets = nn.Linear(6, 6), nn.Linear(6, 1)
        generator, critic = models = [DistributedDataParallel(net.to(DEVICE)) for net in nets]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
        loop, ran = hotloop.Loop(models, optimizers, run=run, total_steps=120, sentinel=0), []

        @loop.step
        def judge(x, z):
            with torch.no_grad():
                fake = generator(z)
            loss = (F.softplus(-critic(x)) + F.softplus(critic(fake))).mean()
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            return loss.detach()

        @loop.step
        def generate(z):
            loss = F.softplus(-critic(generator(z))).mean()
            loss.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            return loss.detach()

        draws = torch.Generator().manual_seed(RANK)
        for number in range(90):
            x, z = (torch.randn(6, 6, generator=draws).to(DEVICE) for _ in range(2))
            judge(x, z)
            if number % 3 == 0:
                generate(z)
                ran.append(loop.last_ran()[1][0])
        left = torch.cat([value.detach().flatten() for model in models for value in model.parameters()])
        loop.close()
        return left, "".join(ran)

    eager, _ = trained("eager")
    with CAPTURES():
        ours, ran = trained("eager+graph")
    return {"same": torch.allclose(eager, ours, rtol=1e-5, atol=1e-6), "ran": ran}


def grouped_anew():
    """The program leaves its groups before it closes its loop, and makes others."""
    with CAPTURES():
        model = DistributedDataParallel(Net().to(DEVICE))
        loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.05), run="eager+graph", total_steps=9)
        dist.destroy_process_group()
        dist.init_process_group(BACKEND, init_method=f"file://{STORE}.anew", rank=RANK, world_size=SIZE)
        loop.close()
    return {"closed": loop.status().closed}


def made_alone():
    """One process makes a loop that the other does not make."""
    model = DistributedDataParallel(Net().to(DEVICE))
    told, mark = "", Path(f"{STORE}.told")
    with CAPTURES(), impatient("made alone"):
        if RANK == 0:
            try:
                hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.05), run="eager+graph", total_steps=9)
            except ConfigError as error:
                told = str(error)
            mark.touch()
        while not mark.exists():
            time.sleep(0.05)
    return {"told": told, "raised": ""}


WAYS = {
    "plain": beside_eager,
    "views": lambda: beside_eager(wrap={"gradient_as_bucket_view": True}),
    "compiled": lambda: beside_eager("aot_eager+graph"),
    "no buffers": lambda: beside_eager(wrap={"broadcast_buffers": False}),
    "small buckets": lambda: beside_eager(wrap={"bucket_cap_mb": 0.0001}),
    "unused": lambda: beside_eager(wrap={"find_unused_parameters": True}),
    "uneven": lambda: beside_eager(joined=True, steps=STEPS if RANK else STEPS - 30),
    "short batches": short_batches,
    "varying shapes": varying_shapes,
    "drops": drops,
    "accumulated": accumulated,
    "compiled by turns": compiled_by_turns,
    "recomputed": lambda: beside_eager(net=Recomputed),
    "host read": host_read,
    "fails in a replay": fails_in_a_replay,
    "fails to capture": fails_to_capture,
    "no memory": no_memory,
    "ends in a capture": ends_in_a_capture,
    "ends between": ends_between,
    "sixteen": lambda: beside_eager(within=no_sync_but_each(16), wrap={"gradient_as_bucket_view": True}, steps=330),
    "four": lambda: beside_eager(within=no_sync_but_each(4), steps=120),
    "flaky": flaky,
    "hooked": hooked,
    "late step": late_step,
    "shared memory": shared_memory,
    "fails in a backward": fails_in_a_backward,
    "no inputs": no_inputs,
    "alone": alone,
    "default stream": lambda: fails_to_capture(range(SIZE), "would make the legacy stream depend on a capture"),
    "adversaries": adversaries,
    "grouped anew": grouped_anew,
    "made alone": made_alone,
}


def main(ways):
    """Live through the scenarios that were named, and print what they tell."""
    torch.set_num_threads(1)
    patience = dt.timedelta(seconds=30 if "hangs" in SCENARIOS else 600)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(BACKEND, init_method=f"file://{STORE}", rank=RANK, world_size=SIZE, timeout=patience)
    told, side = {}, contextlib.nullcontext()
    if DEVICE.type == "cuda":
        side = torch.cuda.stream(torch.cuda.Stream())  # torch before 2.13 captures only a wrapper of another stream
    with side:
        for scenario in SCENARIOS:
            told[scenario] = ways[scenario]()
            if "raised" not in told[scenario]:
                dist.barrier()
    print(json.dumps(told), flush=True)
    if not any("raised" in one for one in told.values()):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(WAYS)
