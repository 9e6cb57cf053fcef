"""The streams of a recording on a GPU, on generators and graphs that count as torch's do: by a seed and an offset."""

from __future__ import annotations

import pytest
import torch

from hotloop.step.capture.device_streams import DeviceStreams
from hotloop.step.state.streams import Streams

DEVICE = torch.device("cuda", 0)


class Philox:
    """A generator of a GPU: several may share one stream."""

    def __init__(self, stream):
        self.stream = stream

    def initial_seed(self):
        return self.stream["seed"]

    def manual_seed(self, seed):
        self.stream.update(seed=seed, offset=0)

    def get_offset(self):
        return self.stream["offset"]

    def set_offset(self, offset):
        self.stream["offset"] = offset

    def get_state(self):
        held = self.stream["seed"].to_bytes(8, "little") + self.stream["offset"].to_bytes(8, "little")
        return torch.frombuffer(bytearray(held), dtype=torch.uint8)

    def set_state(self, state):
        held = bytes(state.tolist())
        self.stream.update(seed=int.from_bytes(held[:8], "little"), offset=int.from_bytes(held[8:], "little"))

    def clone_state(self):
        return Philox(dict(self.stream))

    def graphsafe_get_state(self):
        return Philox(self.stream)

    def graphsafe_set_state(self, other):
        self.stream = other.stream


class Graph:
    """A graph whose kernels draw; each registered stream moves on by all that was drawn from it."""

    def __init__(self, default):
        self.drawn, self.streams = [], [default.stream]

    def register_generator_state(self, generator):
        self.streams.append(generator.stream)

    def draw(self, stream, count):
        assert any(stream is one for one in self.streams), "not registered"
        self.drawn.append((stream, sum(n for one, _, n in self.drawn if one is stream), count))

    def replay(self):
        self.found = [(stream["seed"], stream["offset"] + at) for stream, at, _ in self.drawn]
        for stream, _, count in self.drawn:
            stream["offset"] += count


class Machine:
    """Runs a step eagerly, or captures and replays it; keeps where each draw was made."""

    def __init__(self, monkeypatch):
        self.default, self.graph, self.found = Philox({"seed": 7, "offset": 40}), None, []
        monkeypatch.setattr(torch.cuda, "default_generators", (self.default,))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        for owner in (torch.cuda, torch.cuda.random):
            monkeypatch.setattr(owner, "get_rng_state", lambda device="cuda": self.real().get_state())
            monkeypatch.setattr(owner, "set_rng_state", lambda state, device="cuda": self.real().set_state(state))

    def real(self):
        assert self.graph is None, "not permitted while a stream is captured"
        return self.default

    def draw(self, count):
        if self.graph is not None:
            self.graph.draw(self.default.stream, count)
        else:
            self.found.append((self.default.initial_seed(), self.default.get_offset()))
            self.default.set_offset(self.default.get_offset() + count)

    def eager(self, step):
        self.found = []
        step(self)
        return self.found, self.default.get_state().tolist()

    def captured(self, step):
        streams = Streams(DEVICE)
        with streams.watching():
            step(self)
        draws, self.graph = DeviceStreams(streams, DEVICE), Graph(self.default)
        draws.register(self.graph)
        with draws.served():
            step(self)
        draws.leave()
        graph, self.graph = self.graph, None
        segment = draws.segment(graph, first=True)

        def replay(_):
            segment.replay()
            self.found = graph.found

        return replay


def checkpointed(machine, block):
    """Run a block; give what recomputes it, as torch.utils.checkpoint does."""
    state = torch.cuda.get_rng_state()
    block()

    def recompute():
        around = torch.cuda.get_rng_state(0)
        torch.cuda.set_rng_state(state.clone())
        block()
        torch.cuda.set_rng_state(around, 0)

    return recompute


def blocks(machine):
    machine.draw(4)
    backward = []
    for count in (8, 0, 4):
        backward.append(checkpointed(machine, lambda count=count: machine.draw(count) if count else None))
        machine.draw(4)
    for recompute in reversed(backward):
        recompute()


def last_block_ends_the_forward(machine):
    backward = [checkpointed(machine, lambda: machine.draw(8)), checkpointed(machine, lambda: machine.draw(4))]
    for recompute in reversed(backward):
        recompute()
    machine.draw(4)


def nested(machine):
    inner = []

    def outer():
        machine.draw(4)
        inner.append(checkpointed(machine, lambda: machine.draw(12)))
        machine.draw(4)

    recompute = checkpointed(machine, outer)
    machine.draw(8)
    recompute()
    inner[-1]()


def forked(machine):
    with torch.random.fork_rng(devices=[0], device_type="cuda"):
        machine.draw(8)
    machine.draw(4)
    machine.draw(4)


def set_back(machine):
    state = torch.cuda.get_rng_state(device="cuda:0")
    machine.draw(8)
    torch.cuda.random.set_rng_state(state)
    machine.draw(4)


@pytest.mark.parametrize("step", [blocks, last_block_ends_the_forward, nested, forked, set_back])
def test_a_replay_draws_where_eager_does(monkeypatch, step):
    machine = Machine(monkeypatch)
    replay = machine.captured(step)
    for seed, offset in ((7, 64), (7, 128), (11, 0), (11, 20)):
        machine.default.manual_seed(seed)
        machine.default.set_offset(offset)
        eager = machine.eager(step)
        machine.default.manual_seed(seed)
        machine.default.set_offset(offset)
        assert machine.eager(replay) == eager
