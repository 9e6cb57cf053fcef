"""Steps are timed without waiting; sums of times stand jumps, first calls and heavy tails."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from hotloop.errors import ConfigError
from hotloop.measure import StepClock, interval, ratio_interval


class Stream:
    """A device that passes its recorded events when it is told to; no call waits for it."""

    def __init__(self):
        self.now = self.host = 0.0
        self.made = 0
        self.queue = []

    def event(self):
        self.made += 1
        return FakeEvent(self)

    def work(self, milliseconds):
        self.queue.append(milliseconds)

    def run(self, events=math.inf):
        """Get on with the queue until so many events have been passed."""
        while self.queue and events > 0:
            item = self.queue.pop(0)
            if isinstance(item, FakeEvent):
                item.passed_at = self.now = max(self.now, item.recorded_at)
                events -= 1
            else:
                self.now += item


class FakeEvent:
    def __init__(self, stream):
        self.stream = stream
        self.passed_at = None

    def record(self):
        self.passed_at, self.recorded_at = None, self.stream.host
        self.stream.queue.append(self)

    def query(self):
        return self.passed_at is not None

    def synchronize(self):
        while not self.query():
            self.stream.run(events=1)
        self.stream.host = max(self.stream.host, self.passed_at)

    def elapsed_time(self, end_event):
        if self.passed_at is None or end_event.passed_at is None:
            raise RuntimeError("the device has not got here: torch raises, or would have to wait")
        return end_event.passed_at - self.passed_at


def clock_on(stream, **options):
    return StepClock("cuda", event=stream.event, **options)


def step(clock, stream, milliseconds):
    mark = clock.start()
    stream.work(milliseconds)
    clock.stop(mark)


@pytest.mark.parametrize(("alone", "seconds"), [(False, 0.009), (True, 0.024)])
def test_launches_hide_behind_an_earlier_step_unless_a_step_is_timed_alone(alone, seconds):
    stream = Stream()
    clock = clock_on(stream)
    stream.work(15.0)  # a replay, launched at once: the host is 15 ms ahead
    mark = clock.start(alone=alone)
    stream.host += 24.0  # a step that is 24 ms of launches, and next to nothing on the device
    clock.stop(mark)
    stream.run()
    assert [timing.seconds for timing in clock.take()] == [pytest.approx(seconds)]


def test_times_come_in_order_once_the_device_has_passed_them():
    stream = Stream()
    clock = clock_on(stream)
    for milliseconds in (5.0, 7.0, 2.0):
        step(clock, stream, milliseconds)
        stream.work(100.0)  # between steps: a validation pass, not part of either
    assert clock.take() == []
    stream.run(events=5)
    assert [timing.seconds for timing in clock.take()] == [0.005, pytest.approx(0.007)]
    stream.run()
    assert [timing.seconds for timing in clock.take()] == [pytest.approx(0.002)]
    assert clock.take() == []


def test_the_default_event_is_torchs_with_timing_on_the_stream_of_the_clocks_device(monkeypatch):
    asked, stream = [], Stream()

    class TorchsEvent(FakeEvent):
        def record(self, on):
            asked.append(on)
            super().record()

    monkeypatch.setattr(torch.cuda, "Event", lambda **options: asked.append(options) or TorchsEvent(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    clock = StepClock("cuda:1")
    clock.stop(clock.start())
    assert asked == [{"enable_timing": True}, "the stream of cuda:1"] * 2
    stream.run()
    assert len(clock.take()) == 1


def test_on_the_cpu_both_times_are_the_hosts(monkeypatch):
    ticks = itertools.count(step=0.5)
    monkeypatch.setattr("hotloop.measure.timing.time.perf_counter", lambda: next(ticks))
    clock = StepClock("cpu")
    clock.cancel(clock.start())
    mark = clock.start()
    clock.stop(mark)
    (timing,) = clock.take()
    assert timing.seconds == timing.host_seconds == 0.5


def test_a_clock_without_room_is_refused():
    with pytest.raises(ConfigError, match="pending=0"):
        StepClock("cpu", pending=0)


# Order statistics for 95%, as tabulated (Conover, Practical Nonparametric Statistics, table A3): n, k.
@pytest.mark.parametrize(("n", "k"), [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (25, 8), (50, 18), (100, 40)])
def test_intervals_are_those_of_the_tables(n, k):
    samples = list(range(1, n + 1))
    random.Random(n).shuffle(samples)
    assert interval(samples) == (k, n + 1 - k)


def test_a_machine_that_slows_for_both_cancels_in_pairs():
    draw = random.Random(2)
    speeds = [draw.choice([1.0, 2.0]) for _ in range(20)]
    a = [3.0 * speed * draw.uniform(0.99, 1.01) for speed in speeds]
    b = [1.5 * speed * draw.uniform(0.99, 1.01) for speed in speeds]
    low, high = ratio_interval(a, b)
    assert 1.98 < low < high < 2.02
