"""What cannot be undone ends the run with cause, tier and what to do: after a write, or with a GPU that is lost."""

from __future__ import annotations

import array
import contextlib
import copy
import gc
import itertools

import pytest
import torch
from step_failures import Failure, Plan, Program, Shape, planted, same_bits
from step_programs import contents
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch import capture
from hotloop.errors import CompiledRunError, HotloopError, StepLostError
from hotloop.step.capture import engines
from hotloop.step.prove import proof
from hotloop.step.state import memory_limit, trial_run
from hotloop.step.state.snapshot import Snapshot


class Two:
    """Two models and their optimizers, stepped one after the other: the second's failure comes after the first's write."""

    def __init__(self, run, plan, *, second=None, by_hand=False):
        torch.manual_seed(0)
        self.first, self.second = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)), nn.Linear(5, 4)
        self.average = copy.deepcopy(self.first).requires_grad_(requires_grad=False)
        optimizers = [torch.optim.SGD(self.first.parameters(), lr=0.125, fused=True)]
        optimizers.append((second or torch.optim.SGD)(self.second.parameters(), lr=0.125))
        self.optimizers, self.plan = optimizers, plan
        self.loop = hotloop.Loop([self.first, self.second], optimizers, state=self.average, run=run)

        @self.loop.step
        def train_step(x, y):
            if by_hand:
                with torch.no_grad():
                    for ours, theirs in zip(self.average.parameters(), self.first.parameters(), strict=True):
                        ours.lerp_(theirs, 0.25)
            losses = []
            for model, optimizer in zip((self.first, self.second), optimizers, strict=True):
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss)
            return losses

        self.step = train_step

    def train(self, steps):
        draws = torch.Generator().manual_seed(1)
        for number in range(steps):
            self.plan.begin(number)
            self.step(torch.randn(6, 5, generator=draws), torch.randn(6, 4, generator=draws))

    def lost(self, steps=14):
        with planted(self.plan), pytest.raises(StepLostError) as caught:
            self.train(steps)
        self.loop.close()
        return caught.value


# -- after a write -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["error", "type", "memory"])
@pytest.mark.parametrize("stage", ["forward kernel", "backward kernel"])
def test_compiled_code_that_fails_after_an_optimizer_has_stepped(stage, kind):
    with planted(Plan()):
        two = Two("aot_eager", Plan(Failure(stage, 8, kind, place=1)))
    error = two.lost()
    assert isinstance(error, HotloopError)
    for part in (
        f"planted in {stage}",
        "in tier aot_eager",
        "step 9",
        "after the optimizer had begun to write",
        "cannot be repeated",
        "last checkpoint",
        'Loop(..., run="eager")',
    ):
        assert part in str(error), str(error)
    assert "\n" not in str(error)
    assert isinstance(error.__cause__, torch.OutOfMemoryError if kind == "memory" else CompiledRunError)
    assert two.loop.steps == 8
    assert two.loop.status().undone == 0


def test_before_the_first_write_the_same_failure_is_undone():
    with planted(Plan()):
        two = Two("aot_eager", Plan(Failure("backward kernel", 8, place=0)))
    with planted(two.plan):
        two.train(14)
    assert two.loop.status().undone == 1
    two.loop.close()


def test_in_a_proof_it_is_undone_all_the_same():
    with planted(Plan()):
        two = Two("aot_eager", Plan(Failure("forward kernel", 2, place=1)))
    with planted(two.plan):
        two.train(14)
    assert two.plan.fired
    assert two.loop.status().undone == 1
    two.loop.close()


def test_a_parameter_that_was_written_by_hand_counts_as_a_write():
    with planted(Plan()):
        two = Two("aot_eager", Plan(Failure("forward kernel", 8, place=0)), by_hand=True)
    error = two.lost()
    assert "after a parameter had been written" in str(error)


def test_a_launch_that_fails_after_an_earlier_segment_wrote():
    """An optimizer that cannot be recorded cuts the recording in two; the first half holds the other optimizer's step."""
    with planted(Plan()):
        two = Two("eager+graph", Plan(Failure("launch", 10, place=1)), second=torch.optim.RMSprop)
    error = two.lost()
    assert "planted in launch" in str(error)
    assert "in tier eager+graph, step 11, after the optimizer had begun to write" in str(error)


def test_a_launch_that_fails_before_the_first_segment_is_undone():
    with planted(Plan()):
        two = Two("eager+graph", Plan(Failure("launch", 10, place=0)), second=torch.optim.RMSprop)
    with planted(two.plan):
        two.train(14)
    assert (two.loop.status().undone, two.loop.tier.name) == (1, "eager")
    two.loop.close()


def test_an_outside_optimizer_that_cannot_be_called_after_a_segment_wrote(monkeypatch):
    """No hook tells of the recorded step before it, so the recording itself does."""
    from hotloop.step.capture import outside

    with planted(Plan()):
        two = Two("eager+graph", Plan(), second=torch.optim.RMSprop)
        two.train(10)
        assert two.loop.status().tier == "eager+graph"
        second = two.loop._runners[0].capturing.kinds
        (recording,) = [one.recording for one in second.values() if one.recording is not None]
        broken = torch.OutOfMemoryError("planted between two segments")

        def fails(self, parameters):
            raise broken

        monkeypatch.setattr(outside.OutsideCall, "run", fails)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            two.train(1)
        assert caught.value is broken
        assert recording.wrote
    two.loop.close()


def test_the_users_own_exception_after_a_write_passes_unchanged():
    class Mine(Exception):
        pass

    mine = Mine("theirs", 3)
    for tier in ("aot_eager", "eager+graph", "eager"):
        with planted(Plan()):
            torch.manual_seed(0)
            model = nn.Linear(5, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            loop, fails = hotloop.Loop(model, optimizer, run=tier), []

            @loop.step
            def train_step(x, y, model=model, optimizer=optimizer, fails=fails):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                if fails:
                    raise mine

            for number in range(9):
                if number == 8:
                    fails.append(1)
                x, y = torch.randn(6, 5), torch.randn(6, 4)
                with pytest.raises(Mine) if fails else contextlib.nullcontext() as caught:
                    train_step(x, y)
            assert caught.value is mine
            assert mine.args == ("theirs", 3)
            assert (mine.__cause__, mine.__context__) == (None, None)
            loop.close()


def test_what_cannot_be_put_back_is_lost_and_says_so(monkeypatch):
    """Putting back is no place for surprises; where it fails, half of the step is still there, and nobody may go on."""

    real = Snapshot.restore

    def fails(self):
        raise RuntimeError("planted while the step was undone")

    monkeypatch.setattr(Snapshot, "restore", lambda self: real(self) if self._everything else fails(self))
    plan = Plan(Failure("backward kernel", 6))
    with planted(plan), pytest.raises(StepLostError, match="in tier aot_eager, step 7, and could not be undone"):
        Program(Shape(), "aot_eager", plan).train()
    monkeypatch.setattr(trial_run.Snapshot, "restore", fails)
    plan = Plan(Failure("end", 3))
    with (
        planted(plan),
        pytest.raises(StepLostError, match=r"planted in end in tier eager\+graph, step 4, and could not"),
    ):
        Program(Shape(), "eager+graph", plan).train()


# -- a GPU that is lost --------------------------------------------------------------------------------------------------

DEVICE = torch.device("cuda", 0)
POISONED = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


class Gpu:
    """Stands for a GPU: counts how often it is waited for, and fails once its context is poisoned."""

    def __init__(self, monkeypatch):
        self.indices, self.lost = array.array("b"), False  # whose content is no plain value of a step
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(memory_limit, "device_memory", lambda device: None)  # it has no figures

    @property
    def waited(self):
        return [torch.device("cuda", index) for index in self.indices]

    def wait(self, device=None):
        self.indices.append(torch.device(device or DEVICE).index)
        if self.lost:
            raise RuntimeError(POISONED)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


@pytest.mark.parametrize(
    ("run", "stage", "step"),
    [
        ("aot_eager", "forward kernel", 2),
        ("aot_eager", "backward kernel", 7),
        ("eager+graph", "end", 3),
        ("eager+graph", "launch", 5),
        ("eager+graph", "launch", 9),
    ],
)
def test_a_lost_context_ends_the_run(gpu, run, stage, step):
    plan = Plan(Failure(stage, step))
    with planted(plan):
        program, real = Program(Shape(), run, plan), plan.due

        def due(stage, **how):
            error = real(stage, **how)
            if error is not None:  # from here on the loop believes that it runs on a GPU, which is lost
                gpu.lost = True
                object.__setattr__(program.loop.context, "device", DEVICE)
            return error

        plan.due = due
        with pytest.raises(StepLostError) as caught:
            program.train()
    text = str(caught.value)
    assert text.startswith(f"the CUDA context is lost in tier {run}, step {plan.fired[0].fired[0] + 1}: ")
    assert "illegal memory access" in text
    assert "Start the program again from its last checkpoint" in text
    assert 'Loop(..., run="eager")' in text
    assert "\n" not in text
    assert caught.value.__cause__ is not None
    assert gpu.waited == [DEVICE]


def test_a_sound_gpu_is_asked_and_the_step_undone(gpu):
    shape, plan = Shape(), Plan(Failure("backward kernel", 7))
    with planted(plan):
        program, real = Program(shape, "aot_eager", plan), plan.due

        def due(stage, **how):
            error = real(stage, **how)
            if error is not None:
                del gpu.indices[:]  # a proof has waited for it
            return error

        plan.due = due
        object.__setattr__(program.loop.context, "device", DEVICE)
        program.train()
        assert gpu.waited == [DEVICE]
        assert program.loop.status().undone == 1
        left = program.left()
        program.loop.close()
    same_bits(contents(Program(shape).train().left()), left)


@contextlib.contextmanager
def noted(calls, name):
    calls.append(f"enter {name}")
    yield
    calls.append(f"leave {name}")


class Graphs:
    """Stands for `torch.cuda` while a capture is put right: notes what is called, in order."""

    def __init__(self, monkeypatch, *, fails=()):
        self.calls, self.fails, made = [], fails, itertools.count(1)
        graphs = self

        class Graph:
            def __init__(self):
                self.name = f"graph {next(made)}"

            def capture_begin(self, **settings):
                graphs.note(f"{self.name} begins", settings)

            def capture_end(self):
                graphs.note(f"{self.name} ends")

            def reset(self):
                graphs.note(f"{self.name} is reset")

            def replay(self):
                graphs.note(f"{self.name} replays")

        self.graph = Graph
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: noted(self.calls, stream.name))
        real = capture.private
        mine = lambda path: (lambda *args: self.note(path, args)) if "_cuda_" in path else real(path)  # noqa: E731
        monkeypatch.setattr(capture, "private", mine)

    def note(self, what, *more):
        self.calls.append((what, *more) if more else what)
        if what in self.fails:
            raise RuntimeError(f"planted: {what}")


class Stream:
    def __init__(self, name, graphs=None):
        self.name, self.device, self._graphs = name, torch.device("cuda", 1), graphs

    def wait_stream(self, other):
        self._graphs.note(f"{self.name} waits for {other.name}")


ENDS = "torch._C:_cuda_endAllocateToPool"
RELEASES = "torch._C:_cuda_releasePool"
PUT_RIGHT = [
    "enter side",
    "graph 1 ends",
    (ENDS, (1, "pool")),
    (RELEASES, (1, "pool")),
    "graph 1 is reset",
    ("graph 2 begins", {"capture_error_mode": "thread_local"}),
    "graph 2 ends",
    "leave side",
]


@pytest.mark.parametrize("fails", [(), ("graph 1 ends",), ("graph 1 ends", ENDS)])
def test_a_failed_capture_is_put_right_in_order(monkeypatch, fails):
    """End it, tell the allocator, then capture nothing, which resets the generator; all on the stream of the capture."""
    graphs = Graphs(monkeypatch, fails=fails)
    capture.recover_from_failed_capture(torch.cuda.CUDAGraph(), Stream("side"), "pool")
    # What was not under way any more ended in the graph's own hands, which then gives the pool back as well.
    assert graphs.calls == [one for one in PUT_RIGHT if one[0] != RELEASES or ENDS not in fails]


def test_a_graph_whose_capture_failed_is_kept_since_torch_still_asks_it(monkeypatch):
    graphs = Graphs(monkeypatch, fails=("graph 1 ends",))
    monkeypatch.setattr(capture, "_failed", [])
    failed = torch.cuda.CUDAGraph()
    capture.recover_from_failed_capture(failed, Stream("side"), "pool")
    assert capture._failed == [failed]
    capture.recover_from_failed_capture(torch.cuda.CUDAGraph(), Stream("side"), "pool")
    assert capture._failed == [failed]
    assert graphs.calls


def test_a_torch_without_the_private_name_is_put_right_as_far_as_it_goes(monkeypatch):
    def missing(path):
        raise capture.CapabilityMissingError(path)

    graphs = Graphs(monkeypatch, fails=("graph 1 ends",))
    monkeypatch.setattr(capture, "private", missing)
    capture.recover_from_failed_capture(torch.cuda.CUDAGraph(), Stream("side"), "pool")
    assert graphs.calls == [one for one in PUT_RIGHT if one[0] not in (ENDS, RELEASES)]


@pytest.mark.parametrize("which", ["graph 2 begins", "graph 2 ends"])
def test_what_cannot_be_put_right_is_said_and_raises_nothing(monkeypatch, caplog, which):
    graphs = Graphs(monkeypatch, fails=("graph 1 ends", which))
    capture.recover_from_failed_capture(torch.cuda.CUDAGraph(), Stream("side"), "pool")
    assert graphs.calls[-1] == "leave side"
    assert f"could not be put right after a failed capture: planted: {which}" in caplog.text


# -- the engine around it ------------------------------------------------------------------------------------------------


class Draws:
    """Stands for the random streams of a recording: the step draws nothing."""

    def served(self):
        return contextlib.nullcontext()

    def register(self, graph):
        pass

    def leave(self):
        pass

    def segment(self, graph, *, first):
        return graph


def recording(monkeypatch, *, fails=()):
    """Begin to record on a stand-in for `torch.cuda`."""
    graphs = Graphs(monkeypatch, fails=fails)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: graphs.note("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1, 1))
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: {})  # as without a GPU
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: 1.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream("current", graphs))
    monkeypatch.setattr(engines, "DeviceStreams", lambda streams, device: Draws())
    side, pool = Stream("side", graphs), engines._Pool("pool", apart=False)
    return graphs, lambda: engines._CudaRecording(pool, side, Draws(), reports_capturing=True)


def test_a_recording_that_is_given_up_is_put_right_and_goes_back_to_its_stream(monkeypatch):
    graphs, begin = recording(monkeypatch)
    found = begin()
    del graphs.calls[:]
    found.abandon()
    assert graphs.calls == [*PUT_RIGHT, "leave side", "current waits for side"]


def test_a_recording_whose_end_fails_is_put_right(monkeypatch):
    graphs, begin = recording(monkeypatch, fails=("graph 1 ends",))
    found = begin()
    with pytest.raises(RuntimeError, match="graph 1 ends"):
        found.cut(lambda: None)
    del graphs.calls[:]
    found.abandon()
    assert ("graph 2 begins", {"capture_error_mode": "thread_local"}) in graphs.calls


def test_a_recording_that_cannot_begin_leaves_no_context_open(monkeypatch):
    graphs, begin = recording(monkeypatch, fails=("graph 1 begins",))
    with pytest.raises(RuntimeError, match="graph 1 begins"):
        begin()
    assert graphs.calls[-1] == "current waits for side" or "leave side" in graphs.calls


def test_the_side_stream_is_waited_for_where_the_step_raises(monkeypatch):
    graphs, _ = recording(monkeypatch)
    engine = engines.CudaEngine()
    monkeypatch.setattr(engines, "_side_stream", lambda device: Stream("side", graphs))
    with pytest.raises(ValueError, match="theirs"), engine.ambience(torch.device("cuda", 1), reports_capturing=True):
        raise ValueError("theirs")
    assert graphs.calls[-1] == "current waits for side"


# -- the pool that recordings share --------------------------------------------------------------------------------------


def engine_on(monkeypatch, graphs):
    handles = (f"pool {number}" for number in itertools.count(1))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    engine = engines.CudaEngine()
    monkeypatch.setattr(engines, "_side_stream", lambda device: Stream("side", graphs))
    return engine


def pools(graphs):
    return [one[1]["pool"] for one in graphs.calls if isinstance(one, tuple) and "pool" in one[1]]


def test_recordings_share_a_pool_as_long_as_one_is_there(monkeypatch):
    """torch drops a pool with the last graph in it, and refuses to capture into it again."""
    graphs, _ = recording(monkeypatch)
    monkeypatch.setattr(graphs, "fails", ())
    engine = engine_on(monkeypatch, graphs)
    kept = []
    for _ in range(2):
        found = engine.begin(DEVICE, None, reports_capturing=True)
        kept.append(found.cut(lambda: None))
        found.close()
    assert pools(graphs) == ["pool 1", "pool 1"]
    del found
    kept.clear()
    engine.begin(DEVICE, None, reports_capturing=True).close()
    assert pools(graphs)[-1] == "pool 2"


def test_after_a_failed_capture_the_next_one_has_a_pool_of_its_own(monkeypatch):
    graphs, _ = recording(monkeypatch)
    engine = engine_on(monkeypatch, graphs)
    first = engine.begin(DEVICE, None, reports_capturing=True)
    segment = first.cut(lambda: None)
    first.resume()
    first.abandon()
    engine.begin(DEVICE, None, reports_capturing=True).close()
    assert pools(graphs) == ["pool 1", "pool 1", "pool 2"]
    assert segment is not None


def test_the_collector_rests_while_a_step_is_recorded(monkeypatch):
    _, begin = recording(monkeypatch)
    found = begin()
    assert not gc.isenabled()
    found.abandon()
    assert gc.isenabled()


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"), reason="since torch 2.13")
def test_a_recording_lets_no_stale_stream_into_the_capture_and_puts_the_setting_back():
    now = torch._C._override_stale_capture_stream
    assert not now()
    with capture.stale_streams_overridden():
        assert now()
        with capture.stale_streams_overridden():
            assert now()
        assert now()
    assert not now()


def test_code_of_a_proof_that_captures_for_itself_waits_for_the_gpu_before_it_replays(monkeypatch):
    done, program = [], Program(Shape(), run="eager")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))

    class Graph:
        def capture_end(self):
            done.append("captured")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    def captures():
        Graph().capture_end()

    proof.plain_run(program.loop.context.holdings, captures)
    captures()
    assert done == ["captured", "waited", "captured"]
