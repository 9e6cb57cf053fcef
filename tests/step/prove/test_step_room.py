"""The memory that proofs may take: copies go to the host, tiers are declined with figures, and no run ends by it."""

import copy
import gc

import pytest
import torch
from step_memory import live_bytes
from step_sentinels import checked_every
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as heard
from hotloop.measure.machine import DeviceMemory
from hotloop.step.capture import recording
from hotloop.step.loop import runner
from hotloop.step.prove import graph_proofs
from hotloop.step.state import memory_limit, snapshot
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program
from hotloop.testing import captured, captured_step_emulation

WIDTH = 64


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


SIZE = sum(one.nbytes for one in Net().parameters())


class Card:
    """A device of some bytes, of which live tensors take theirs, in place of a GPU."""

    def __init__(self, monkeypatch, total, *, step=0):
        self.total, self.step = total, step
        monkeypatch.setattr(memory_limit, "device_memory", self.memory)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def memory(self, _device):
        taken = live_bytes() - self.others
        return DeviceMemory(self.total, self.total - taken, taken, taken, taken + self.step, taken + self.step)

    others = 0


def train(run="eager+graph", *, steps=10, sentinel=None, before=None, **more):
    """Train; gives the model, what was told, the loop's status, and what the steps did."""
    torch.manual_seed(0)
    gc.collect()
    Card.others = live_bytes()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    with captured_step_emulation(), hotloop.watch() as told:
        loop = hotloop.Loop(model, optimizer, run=run, sentinel=sentinel, **more)

        @loop.step
        def step(x):
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        did = []
        for number in range(steps):
            if before is not None:
                before(number)
            step(torch.randn(2, WIDTH))
            did.append(loop.last_ran())
        status = loop.status()
        loop.close()
    return model, told, status, did


def equal_to_eager(model, steps=10):
    eager = train("eager", steps=steps)[0]
    return all(torch.equal(*pair) for pair in zip(model.parameters(), eager.parameters(), strict=True))


def declined(told):
    return [event.reason for event in told if isinstance(event, heard.TierDeclined)]


@pytest.mark.parametrize("room_for", [0, 1.5, 100])
def test_copies_that_do_not_fit_are_on_the_host(monkeypatch, room_for):
    """The state is three models; it is copied in portions, each to where there is room."""
    Card(monkeypatch, int((3 + room_for) * SIZE * 10 / 9))
    taken = []
    real = snapshot.copies_on_host
    monkeypatch.setattr(
        snapshot, "copies_on_host", lambda some: taken.append(sum(one.nbytes for one in some)) or real(some)
    )
    model, told, _, did = train()
    (proven,) = [event for event in told if isinstance(event, heard.TierProven)]
    assert did[-1] == ("eager+graph", "run")
    assert proven.on_host == (room_for < 3)
    assert (max(taken, default=0) > 2.8 * SIZE) == (room_for == 0)
    assert (max(taken, default=0) == 0) == (room_for == 100)
    monkeypatch.undo()
    assert equal_to_eager(model)


def test_a_snapshot_undoes_and_exchanges_wherever_its_copies_are(monkeypatch):
    model = Net()
    program = Program(lambda: None, Holdings({"model": model}, {}), torch.device("cpu"), lambda: False)
    was = copy.deepcopy(model.state_dict())
    gc.collect()
    Card.others = live_bytes()
    Card(monkeypatch, int(0.5 * SIZE * 10 / 9))
    before = snapshot.Snapshot(program)
    assert before.on_host
    with torch.no_grad():
        [one.add_(1) for one in model.parameters()]
    left = copy.deepcopy(model.state_dict())
    before.exchange()
    assert all(torch.equal(one, was[name]) for name, one in model.state_dict().items())
    assert all(torch.equal(before.saved[f"parameter {name}"], one) for name, one in left.items())
    Card(monkeypatch, SIZE, step=10 * SIZE)
    program.room._steps[program.device] = 10 * SIZE
    assert before.make_room() > 0
    assert len(before._hosted) == len(left)
    before.restore()
    assert all(torch.equal(one, left[name]) for name, one in model.state_dict().items())


def test_what_a_step_takes_is_known_though_the_program_resets_the_peak(monkeypatch):
    card = Card(monkeypatch, int(100 * SIZE), step=98 * SIZE)

    def resets(number):
        card.step = 98 * SIZE if number == 0 else 0

    _, told, _, _ = train(before=resets)
    (proven,) = [event for event in told if isinstance(event, heard.TierProven)]
    assert proven.on_host


def test_a_recording_beside_which_no_step_fits_is_let_go_before_eager_runs(monkeypatch):
    """Its figures are those of the recording itself: what an eager step takes is what it has taken."""
    order = []

    def noted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: order.append(name) or real(*args))

    noted(recording.CapturedStep, "finish")
    noted(recording.CapturedStep, "release")
    noted(runner.StepRunner, "_plain")
    monkeypatch.setattr(
        captured.TapeEngine, "pool_bytes", property(lambda _: 3_100_000_000 if "finish" in order else 0)
    )
    Card(monkeypatch, 10**9, step=10**10)
    model, told, _, did = train()
    (reason,) = declined(told)
    assert "an eager step beside its recording needs 2.1 GB more than is free on cpu" in reason
    assert order[:4] == ["_plain", "finish", "release", "_plain"]
    assert did[-1] == ("eager", "run")
    monkeypatch.undo()
    assert equal_to_eager(model)


@pytest.mark.parametrize("which", ["the second run of the warm-up", "the reference of a proof"])
def test_memory_that_ends_in_the_run_that_stays_declines(monkeypatch, which):
    """The run that is a real step finds the copies of the proof in its way; eager alone fits."""
    real, calls = graph_proofs.GraphProofs.reference, []

    def ends(self, path, run):
        calls.append(1)
        if len(calls) == (1 if "warm-up" in which else 2):
            raise torch.OutOfMemoryError("no memory beside the copies")
        return real(self, path, run)

    monkeypatch.setattr(graph_proofs.GraphProofs, "reference", ends)
    model, told, _, did = train()
    assert ["no memory beside the copies" in reason for reason in declined(told)] == [True]
    assert did[-1] == ("eager", "run")
    assert equal_to_eager(model)


def test_a_check_of_the_sentinel_for_which_there_is_no_memory_is_a_replay(monkeypatch, caplog):
    caplog.set_level("INFO", "hotloop")
    full = []
    real = snapshot.Snapshot.__init__

    def ends(self, *args, **more):
        if full:
            raise torch.OutOfMemoryError("no memory for a copy")
        real(self, *args, **more)

    monkeypatch.setattr(snapshot.Snapshot, "__init__", ends)
    with checked_every(3):
        model, _, _, did = train(sentinel=0.5, steps=14, before=lambda number: full.append(1) if number == 7 else None)
    assert {tier for tier, _ in did[7:]} == {"eager+graph"}
    assert [doing for _, doing in did[8:]].count("sentinel") == 2  # operations are compared on
    assert "compared with eager's no more: a step and a copy of its state do not fit in memory together" in caplog.text
    assert equal_to_eager(model, 14)


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager"])
def test_the_caches_of_proofs_are_given_back_once_after_the_last_of_them(monkeypatch, run):
    given, counts = [], []
    monkeypatch.setattr(
        memory_limit.Room, "give_back", lambda self, _: given.append(1) or setattr(self, "proved", False)
    )
    did = train(run, steps=20, before=lambda _: counts.append(len(given)))[3]
    proofs = [step for step, (_, doing) in enumerate(did) if doing in ("proof", "capture")]
    assert proofs
    assert counts[proofs[-1] + 1] == 0
    assert counts[-1] == len(given) == 1


def test_what_torch_took_is_in_the_status_and_in_the_record(monkeypatch):
    Card(monkeypatch, 10**9, step=5 * 10**8)
    _, _, status, _ = train()
    assert status.memory.eager >= 5 * 10**8
    assert status.memory.in_force < status.memory.proving
    assert "memory that torch took: 0.5 GB eager, 0.5 GB while proving, " in str(status)
    assert status.memory.figures().keys() == {
        "eager_peak_memory_bytes", "proving_peak_memory_bytes", "in_force_memory_bytes",
    }  # fmt: skip
