"""Training runs into which failures are planted: one place where each stage of compiling, capturing and running can fail.

A `Plan` says which failures come, in which stage and from which step on; `planted` puts them there. `Case` is one run of
the campaign, drawn from its seed alone, so that a seed that fails can be run again by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import random
from unittest import mock

import torch
from step_programs import contents, same
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch import backends
from hotloop.step.audit import op_trace
from hotloop.step.prove import graph_proofs, proof
from hotloop.step.state import trial_run
from hotloop.testing import captured, captured_step_emulation

TELLS = "planted"


class Unprintable(Exception):
    """Cannot even be shown, as an exception whose arguments are gone."""

    def __str__(self):
        raise ValueError("this exception has no text")


@dataclasses.dataclass
class Failure:
    """One planted failure: it comes as soon as its stage is reached in or after its step, so many times."""

    # It stands around the program as hotloop's own parts do: what it counts is no state of the step's.
    __module__ = "hotloop.testing"

    stage: str
    step: int = 0
    kind: str = "error"
    place: int = 0
    """How many operations, or graphs, of the step come before it."""
    late: bool = False
    """What fails has done its work by then."""
    times: int = 1
    fired: list[int] = dataclasses.field(default_factory=list)

    def error(self):
        if self.kind == "memory":
            return torch.OutOfMemoryError(f"out of memory: {TELLS} in {self.stage}")
        if self.kind == "unprintable":
            return Unprintable()
        return {"error": RuntimeError, "type": TypeError}[self.kind](f"{TELLS} in {self.stage}")

    @property
    def tells(self):
        """What a status must say of it."""
        return "Unprintable" if self.kind == "unprintable" else f"{TELLS} in {self.stage}"


class Plan:
    """The failures of one run; ``step`` is set by the program as it goes."""

    __module__ = Failure.__module__  # for the same reason

    def __init__(self, *failures):
        self.failures, self.step = failures, 0
        self._counts = {}

    def begin(self, step):
        self.step = step
        self._counts.clear()

    def due(self, stage, *, late=False):
        """Give the exception to raise here, or None."""
        if not late:
            self._counts[stage] = self._counts.get(stage, -1) + 1
        for one in self.failures:
            here = one.stage == stage and one.late == late and self._counts[stage] >= one.place
            if here and self.step >= one.step and len(one.fired) < one.times:
                one.fired.append(self.step)
                return one.error()
        return None

    def reach(self, stage, **how):
        if (error := self.due(stage, **how)) is not None:
            raise error

    @property
    def fired(self):
        return [one for one in self.failures if one.fired]


_KERNEL = """
def kernel(args):
    if (error := due(stage)) is not None:
        raise error
    made = run(*args)
    if (error := due(stage, late=True)) is not None:
        raise error
    return made
"""


def kernel(plan, stage, graph):
    """A compiled graph that fails from a file that is nobody's own, as a generated kernel does."""
    space = {"due": plan.due, "run": graph.forward, "stage": stage}
    exec(compile(_KERNEL, "/tmp/torchinductor_planted/kernel.py", "exec"), space)
    space["kernel"]._boxed_call = True
    return space["kernel"]


def compiler(plan):
    """aot_eager, with a place for each failure while a graph is compiled and while it runs."""
    from torch._dynamo.backends.common import aot_autograd

    def forward(graph, inputs):
        plan.reach("forward compile")
        return kernel(plan, "forward kernel", graph)

    def backward(graph, inputs):
        plan.reach("backward compile")
        return kernel(plan, "backward kernel", graph)

    inner = aot_autograd(fw_compiler=forward, bw_compiler=backward, inference_compiler=forward)

    def backend(graph, inputs):
        plan.reach("lower")
        return inner(graph, inputs)

    return backend


def before(plan, stage, function):
    """A function, or method, that fails in a stage; ``late`` failures come after its work."""

    @functools.wraps(function)
    def failing(*args, **kwargs):
        plan.reach(stage)
        made = function(*args, **kwargs)
        plan.reach(stage, late=True)
        return made

    return failing


PLACES = {
    "begin": (captured.TapeEngine, "begin"),
    "operation": (captured.Tape, "record"),
    "end": (captured.TapeRecording, "cut"),
    "launch": (captured.Tape, "replay"),
    "survey": (op_trace.OpTrace, "operation"),
    "compare": (proof, "compare_kinds"),
    "candidate": (graph_proofs.GraphProofs, "candidate"),
    "copy": (trial_run, "Snapshot"),
}
"""Where each stage of a capture and a proof is."""


@contextlib.contextmanager
def planted(plan):
    """Have the failures of a plan happen while the block runs, on the stand-in for captures and on aot_eager."""
    from torch._dynamo.variables.tensor import TensorVariable

    with contextlib.ExitStack() as stack:
        stack.enter_context(captured_step_emulation())
        for stage, (owner, name) in PLACES.items():
            stack.enter_context(mock.patch.object(owner, name, before(plan, stage, getattr(owner, name))))
        traced = before(plan, "trace", TensorVariable.call_method)
        stack.enter_context(mock.patch.object(TensorVariable, "call_method", traced))
        stack.enter_context(mock.patch.object(backends, "aot_eager", return_value=compiler(plan)))
        yield


# -- the programs ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two halves with BatchNorm and dropout, in two graphs if compiled; the second half's weight is used twice."""

    def __init__(self, width=6):
        super().__init__()
        self.first, self.norm = nn.Linear(width, 10), nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.25)
        self.second, self.norm_2 = nn.Linear(10, 10), nn.BatchNorm1d(10, momentum=0.3)
        self.again = nn.Linear(10, 10, bias=False)
        self.again.weight = self.second.weight
        self.head = nn.Linear(10, 3)

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)).relu())
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()
        x = self.drop(self.norm_2(self.second(x)).sigmoid())
        return self.head(self.again(x))


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a program is like, apart from what is planted."""

    optimizer: str = "sgd"
    accumulates: bool = False
    scales: bool = False
    plays: bool = False
    """The step draws from Python's random stream, too; it is not captured then."""
    steps: int = 16
    changes: int = 99
    """The step from which batches are of another size: what was compiled or captured is made again then."""
    seed: int = 0


def batches(shape):
    draws = torch.Generator().manual_seed(shape.seed)
    for step in range(shape.steps):
        size = 6 if step < shape.changes else 4
        yield torch.randn(size, 6, generator=draws), torch.randint(3, (size,), generator=draws)


def optimizer_of(shape, parameters):
    # Rates that float32 holds exactly: a recording has them on the device in that, where eager has a Python float.
    if shape.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.125, momentum=0.875, fused=True)
    return torch.optim.AdamW(parameters, lr=0.015625, weight_decay=0.125, fused=True)


class Program:
    """One training run, eager or owned by a loop; what it leaves can be compared bit by bit."""

    def __init__(self, shape, run=None, plan=None, **settings):
        self.shape, self.plan = shape, plan or Plan()
        torch.manual_seed(shape.seed)
        random.seed(shape.seed)
        self.model = Net()
        self.optimizer = optimizer_of(shape, self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if shape.scales else None
        state = (self.scaler,) if shape.scales else ()
        self.loop = hotloop.Loop(self.model, self.optimizer, run=run, state=state, **settings) if run else None
        self.step = self.loop.step(self.make_step()) if run else self.make_step()
        self.losses = []

    def make_step(self):
        model, optimizer, scaler, plays = self.model, self.optimizer, self.scaler, self.shape.plays

        def train_step(x, y, update=True):
            loss = F.cross_entropy(model(x), y)
            if plays:
                loss = loss * random.random()
            if scaler is None:
                loss.backward()
            else:
                scaler.scale(loss).backward()
            if update and scaler is None:
                optimizer.step()
            elif update:
                scaler.step(optimizer)
                scaler.update()
            if update:
                optimizer.zero_grad()
            return loss

        return train_step

    def train(self):
        """Run all steps; the losses are kept as the user holds them, and read at the end only."""
        for number, (x, y) in enumerate(batches(self.shape)):
            self.plan.begin(number)
            more = {"update": number % 3 == 2} if self.shape.accumulates else {}
            self.losses.append(self.step(x, y, **more))
        return self

    def left(self):
        """Give everything that the run left, by name."""
        return {
            "losses": contents(self.losses),
            "model": contents(self.model),
            "optimizer": contents(self.optimizer),
            "scaler": contents(self.scaler.state_dict()) if self.scaler is not None else None,
            "random": [torch.get_rng_state(), repr(random.getstate())],
        }

    def told(self):
        """Give all that status and record say of the run, as one text."""
        found = [self.loop.status().to_dict(), hotloop.status(self.model).to_dict()]
        return json.dumps([*found, self.loop.record.document["verdicts"]], default=str)


@functools.lru_cache(maxsize=512)
def eager(shape):
    """What the program leaves without a loop."""
    return Program(shape).train().left()


# -- the campaign ------------------------------------------------------------------------------------------------------

COMPILING = ("trace", "lower", "forward compile", "backward compile")
RUNNING = ("forward kernel", "backward kernel")
CAPTURING = ("begin", "operation", "end", "launch")
PROVING = ("survey", "copy", "compare", "candidate")
STAGES = {
    "eager+graph": CAPTURING + PROVING,
    "aot_eager": COMPILING + RUNNING + PROVING[:3],
    "aot_eager+graph": COMPILING + RUNNING + CAPTURING + PROVING,
}
"""What can fail on the way to a tier and in it."""
CAPTURED = [("eager+graph", stage) for stage in STAGES["eager+graph"]]
COMPILED = [
    *itertools.product(("aot_eager", "aot_eager+graph", "aot_eager"), RUNNING),
    *((run, stage) for run in ("aot_eager", "aot_eager+graph") for stage in STAGES[run] if stage not in RUNNING),
]
"""What fails first, by turns, since a compiled run costs ten times as much as a captured one."""
WHOLE = (*COMPILING, "begin", "launch", "copy")
"""What is done or is not: it does not fail once it has done its work."""
KINDS = ("error", "type", "memory", "unprintable")
NEVER = 99


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of the campaign."""

    run: str
    shape: Shape
    failures: tuple[tuple, ...]

    @classmethod
    def drawn(cls, seed):
        draw = random.Random(seed)
        run, first = COMPILED[seed // 5 % len(COMPILED)] if seed % 5 == 0 else CAPTURED[seed % len(CAPTURED)]
        stages = [first, draw.choice(STAGES[run])][: draw.choice((1, 1, 2))]
        # A kernel that fails late has gradients to spoil where some exist at the start of the step.
        accumulates = draw.random() < (0.7 if stages[0] in RUNNING else 0.3)
        failures = [_failure(draw, run, stage, accumulates) for stage in stages]
        stage, step = failures[0][:2]
        # What is compiled or captured once only can fail later on where a batch of another size comes.
        again = stage in COMPILING or (run == "eager+graph" and not accumulates and (stage != "launch" or step < 10))
        shape = Shape(
            optimizer=draw.choice(("sgd", "adamw")),
            accumulates=accumulates,
            scales=draw.random() < 0.25,
            plays=run == "aot_eager" and draw.random() < 0.5,
            steps=24 if accumulates and run != "aot_eager" else 18,
            changes=max(1, step) if again else NEVER,
            seed=draw.randrange(4),
        )
        return cls(run, shape, tuple(failures))

    def plan(self):
        return Plan(*(Failure(*one) for one in self.failures))

    @property
    def brings(self):
        """What it tries: two cases with all of this in common would fail for the same reasons."""
        run, shape, stages = self.run, self.shape, tuple(one[0] for one in self.failures)
        tried = {(run, stages), (shape.optimizer, shape.accumulates, shape.scales)}
        for stage, step, kind, _, late, _ in self.failures:
            tried |= {step, (run, stage, kind), (run, stage, late), (run, stage, "sum", shape.accumulates)}
        return tried


def telling(seeds):
    """Keep the seeds whose cases try something that none before them does."""
    kept = {}
    for seed in seeds:
        brings = Case.drawn(seed).brings
        if not brings <= set().union(*kept.values()):
            kept[seed] = brings
    return list(kept)


def _failure(draw, run, stage, accumulates):
    if stage in COMPILING:
        last = 12
    elif stage in RUNNING:
        last = 16
    elif run == "aot_eager" and stage != "survey":
        last = 2
    elif stage == "launch":
        last = 16 if not accumulates else 12
    else:
        last = 5 if accumulates or run != "eager+graph" else 11
        if stage == "survey":
            last = 0 if run != "eager+graph" else 3 if accumulates else 11
    kinds = KINDS[:3] if stage in COMPILING + RUNNING else KINDS  # an unprintable one is named otherwise there
    return (
        stage,
        draw.randrange(last + 1),
        draw.choice(kinds),
        draw.randrange(60) if stage in ("operation", "survey") else draw.randrange(2) * (stage in RUNNING),
        stage not in WHOLE and draw.random() < 0.4,
        draw.choice((1, 1, 9)),
    )


def same_bits(reference, found):
    same(reference, found, exact=True)


class Planted(Exception):
    """Nobody's but ours."""


def plant(monkeypatch, owner, name, *, after=0):
    """Let what is ours fail at each of its calls but the first ones; returns a list with an entry for each failure."""
    real, calls, failed = getattr(owner, name), [], []
    is_property = isinstance(real, property)
    real = real.fget if is_property else real

    def failing(*args, **kwargs):
        calls.append(None)
        if len(calls) > after:
            failed.append(None)
            raise Planted(name)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, property(failing) if is_property else failing)
    return failed
