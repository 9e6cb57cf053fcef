"""A failing compiler, capture or proof costs speed, never the run: planted failures, held against a run that was eager."""

from __future__ import annotations

import array
import collections
import copy
import gc
import itertools
import weakref

import pytest
import torch
from step_failures import (
    CAPTURING,
    COMPILING,
    KINDS,
    PROVING,
    RUNNING,
    STAGES,
    Case,
    Failure,
    Net,
    Plan,
    Program,
    Shape,
    eager,
    planted,
    same_bits,
    telling,
)
from step_programs import contents
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.step.state import trial_run
from hotloop.step.state.snapshot import Snapshot

SEEDS = telling(range(200))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.some_of(3)
def test_campaign(seed):
    """A seed that fails is run again alone by its number: ``-k "test_campaign[17]"``."""
    case = Case.drawn(seed)
    plan = case.plan()
    with planted(plan), hotloop.watch() as events:
        program = Program(case.shape, case.run, plan).train()
        left = program.left()
        told = program.told()
        program.loop.close()
    same_bits(eager(case.shape), left)
    assert plan.fired, f"nothing failed, so nothing was tested: {case}"
    step = max(one.fired[-1] for one in plan.fired)
    assert any(one.tells in told for one in plan.fired if one.fired[-1] == step), (case, told)
    for failure in plan.fired:  # of two, the first may have been in code that the second has since done away with
        assert failure.tells in told + str(events), (case, told, events)


def test_the_campaign_draws_every_stage_in_every_tier_and_kind():
    cases = [Case.drawn(seed) for seed in SEEDS]
    drawn = collections.Counter((case.run, one[0]) for case in cases for one in case.failures)
    assert set(drawn) == {(run, stage) for run, stages in STAGES.items() for stage in stages}
    kinds = {(one[0], one[2]) for case in cases for one in case.failures}
    assert set(KINDS) == {kind for _, kind in kinds}
    assert {stage for stage, kind in kinds if kind == "unprintable"} == set(CAPTURING + PROVING)
    shapes = {(case.shape.optimizer, case.shape.accumulates, case.shape.scales) for case in cases}
    assert len(shapes) == 8
    assert sum(len(case.failures) == 2 for case in cases) > 40
    steps = {one[1] for case in cases for one in case.failures}
    assert set(range(15)) <= steps


# -- what each stage costs -----------------------------------------------------------------------------------------------

DECLINED = "declined"
CASES = [
    # asked for, stage, step, place, late; then: the tier of the last step, steps undone.
    ("eager+graph", "survey", 1, 20, False, "eager", 0),
    ("eager+graph", "copy", 2, 0, False, "eager", 0),
    ("eager+graph", "begin", 3, 0, False, "eager", 0),
    ("eager+graph", "operation", 3, 30, True, "eager", 0),
    ("eager+graph", "end", 3, 0, True, "eager", 0),
    ("eager+graph", "compare", 4, 0, False, "eager", 0),
    ("eager+graph", "candidate", 4, 0, True, "eager", 0),
    ("eager+graph", "launch", 4, 0, False, "eager", 0),
    ("eager+graph", "launch", 9, 0, False, "eager", 1),
    ("aot_eager", "copy", 2, 0, False, "eager", 1),
    ("aot_eager", "compare", 2, 0, False, "eager", 0),
    ("aot_eager", "forward kernel", 1, 1, False, "eager", 1),
    ("aot_eager", "backward kernel", 2, 1, True, "eager", 1),
    ("aot_eager", "forward kernel", 8, 1, True, "eager", 1),
    ("aot_eager", "backward kernel", 8, 1, False, "eager", 1),
    ("aot_eager", "lower", 1, 0, False, "aot_eager", 0),
    ("aot_eager", "trace", 1, 0, False, "aot_eager", 0),
    ("aot_eager+graph", "forward kernel", 2, 1, False, "eager+graph", 1),
    ("aot_eager+graph", "end", 4, 0, False, "aot_eager", 0),
    ("aot_eager+graph", "launch", 12, 0, False, "eager+graph", 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.some_of(3)
def test_one_rung_down(case):
    run, stage, step, place, late, tier, undone = case
    shape, failure = Shape(steps=22), Failure(stage, step, "error", place, late)
    plan = Plan(failure)
    with planted(plan), hotloop.watch() as events:
        program = Program(shape, run, plan).train()
        left, status, told = program.left(), program.loop.status(), program.told()
        program.loop.close()
    same_bits(eager(shape), left)
    assert len(failure.fired) == 1
    assert (status.tier, status.undone) == (tier, undone)
    assert failure.tells in told
    undone_events = [one for one in events if isinstance(one, ev.StepUndone)]
    assert [one.reason for one in undone_events] == [f"RuntimeError: {failure.tells}"] * undone
    declined = [one for one in events if isinstance(one, ev.TierDeclined)]
    assert len(declined) == (stage not in COMPILING)
    assert all(failure.tells in one.reason for one in declined)
    if stage not in COMPILING:
        why = {one.name: one for one in status.tiers}[declined[0].tier]
        assert why.state == DECLINED
        assert failure.tells in why.why


@pytest.mark.parametrize("stage", COMPILING + RUNNING + CAPTURING + PROVING)
def test_out_of_memory_at_each_stage(stage):
    shape, failure = Shape(optimizer="adamw", steps=12), Failure(stage, 1, "memory")
    plan = Plan(failure)
    with planted(plan):
        program = Program(shape, "aot_eager" if stage in COMPILING + RUNNING else "eager+graph", plan).train()
        left, told = program.left(), program.told()
        program.loop.close()
    assert failure.fired
    assert failure.tells in told
    same_bits(eager(shape), left)


@pytest.mark.parametrize("stage", ["lower", "forward kernel"])
def test_an_exception_without_text_is_told_by_its_class_where_the_compiler_raises_it(stage):
    plan = Plan(Failure(stage, 1, "unprintable"))
    with planted(plan):
        program = Program(Shape(), "aot_eager", plan).train()
        told = program.told()
        program.loop.close()
    assert plan.fired
    assert "Unprintable" in told


@pytest.mark.parametrize("stage", ["lower", "forward kernel", "backward kernel", "end", "launch", "copy", "compare"])
def test_an_exception_without_text_costs_no_more_than_another(stage):
    shape, run = Shape(), "aot_eager" if stage in COMPILING + RUNNING else "eager+graph"
    plan = Plan(Failure(stage, 1, "unprintable"))
    with planted(plan):
        program = Program(shape, run, plan).train()
        left = program.left()
        program.loop.close()
    assert plan.fired
    same_bits(eager(shape), left)


# -- what an undo must find ----------------------------------------------------------------------------------------------


class Kept(nn.Module):
    """A buffer that comes and goes, one that is expanded, and one that a step replaces."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 3), nn.BatchNorm1d(6)
        self.register_buffer("places", torch.arange(3.0).reshape(1, 3).expand(4, 3))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("late", None)

    def forward(self, x):
        y = self.inner(self.norm(x)) + self.places[:1]
        return y * self.scale


def kept_program(run, plan, *, at_step=lambda model, step: None, in_step=lambda model: None, steps=10):
    torch.manual_seed(0)
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run=run) if run else None

    def train_step(x, y):
        in_step(model)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = loop.step(train_step) if loop else train_step
    losses, draws = [], torch.Generator().manual_seed(0)
    for number in range(steps):
        plan.begin(number)
        at_step(model, number)
        losses.append(step(torch.randn(4, 6, generator=draws), torch.randint(3, (4,), generator=draws)))
    undone = loop.status().undone if loop else 0
    if loop:
        loop.close()
    return {"losses": contents(losses), "model": contents(model), "late": contents(model.late)}, undone


def grows(model):
    model.late = torch.zeros(()) if model.late is None else model.late + 1


def replaces(model):
    model.scale = model.scale * 1.25


def comes_and_goes(model, step):
    model.late = torch.full((), float(step)) if step % 2 else None


def is_replaced(model, step):
    model.scale = torch.full((1,) * (step % 3), 1.0 + step)


@pytest.mark.parametrize(
    "changes",
    [{}, {"in_step": grows}, {"in_step": replaces}, {"at_step": comes_and_goes}, {"at_step": is_replaced}],
    ids=["expanded", "made in the step", "replaced in the step", "comes and goes", "replaced between steps"],
)
@pytest.mark.parametrize("stage", ["forward kernel", "backward kernel"])
def test_buffers_of_every_kind_go_back(stage, changes):
    reference, _ = kept_program(None, Plan(), **changes)
    plan = Plan(Failure(stage, 6, late=True))
    with planted(plan):
        left, undone = kept_program("aot_eager", plan, **changes)
    same_bits(reference, left)
    assert undone == 1


@pytest.mark.parametrize("failing", [7, 12])
def test_a_module_that_was_added_between_steps_goes_back_as_well(failing):
    """While the code that is compiled for it is proven, and after that."""

    def add(model, step):
        if step == 5:
            model.inner = nn.Sequential(nn.BatchNorm1d(6), model.inner)

    reference, _ = kept_program(None, Plan(), at_step=add, steps=15)
    plan = Plan(Failure("backward kernel", failing, late=True))
    with planted(plan):
        left, undone = kept_program("aot_eager", plan, at_step=add, steps=15)
    assert undone == 1
    same_bits(reference, left)


def kept_places(steps):
    """Tell for each step and parameter whether the gradient is the same tensor as one step before."""
    return [[a is b for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(steps)]


def test_gradients_that_are_read_go_back_and_keep_their_place():
    """Two backwards in one step, the second of which fails: what the first added to the gradients is taken back."""
    torch.manual_seed(0)
    model = Net()
    reference = copy.deepcopy(model)
    x, y = torch.randn(6, 6), torch.randint(3, (6,))

    def program(model, loop, plan):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        owned = hotloop.Loop(model, optimizer, run="aot_eager") if loop else None

        def train_step(x, y, update):
            for _ in range(2):
                F.cross_entropy(model(x), y).backward()
            if update:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

        step = owned.step(train_step) if loop else train_step
        torch.manual_seed(1)
        held = []
        for number in range(12):
            plan.begin(number)
            step(x, y, number % 4 == 3)
            held.append([one.grad for one in model.parameters()])
        if owned:
            assert owned.status().undone == 1
            owned.close()
        return held

    theirs = program(reference, None, Plan())
    plan = Plan(Failure("backward kernel", 9, place=3, late=True))
    with planted(plan):
        ours = program(model, "aot_eager", plan)
    same_bits(contents(reference), contents(model))
    assert kept_places(ours) == kept_places(theirs)


@pytest.mark.campaign
def test_what_a_scaler_noted_is_taken_back():
    """It refuses to unscale twice in one step, and an undone step did so already."""

    def program(run, plan):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        loop = hotloop.Loop(model, optimizer, state=scaler, run=run) if run else None

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            with torch.no_grad():
                model(x)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        step, losses, draws = loop.step(train_step) if loop else train_step, [], torch.Generator().manual_seed(0)
        for number in range(9):
            plan.begin(number)
            x, y = torch.randn(6, 6, generator=draws), torch.randint(3, (6,), generator=draws)
            losses.append(step(x, y))
        undone = loop.status().undone if loop else 0
        if loop:
            loop.close()
        left = [contents(losses), contents(model), scaler.state_dict(), torch.get_rng_state()]
        return left, undone

    reference, _ = program(None, Plan())
    plan = Plan(Failure("forward kernel", 6, place=3))
    with planted(plan):
        left, undone = program("aot_eager", plan)
    assert undone == 1
    same_bits(reference, left)


ENTRIES = ("begins", "steps", "made", "died")


def noting():
    """Return a log, and what adds a word to it: an array's content is no plain value of the step that adds it."""
    log = array.array("b")
    return log, lambda word: log.append(ENTRIES.index(word))


def living(log, at):
    """Return how many of the things that were made are alive at each such entry of a log, to which code only adds."""
    alive, found = 0, []
    for entry in (ENTRIES[number] for number in log):
        alive += {"made": 1, "died": -1}.get(entry, 0)
        found += [alive] if entry == at else []
    return found


def test_a_failed_step_holds_no_memory_while_it_is_run_again():
    """Out of memory is worth an undo only if what the failed attempt had computed is given back first."""
    model, (log, note) = Net(), noting()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    plan = Plan(Failure("backward kernel", 5, "memory"))
    with planted(plan), hotloop.Loop(model, optimizer, run="aot_eager") as loop:

        @loop.step
        def train_step(x, y):
            gc.disable()
            note("begins")
            output = model(x)
            activation = output.relu()
            for one in (activation, output):
                weakref.finalize(one, note, "died")
                note("made")
            F.cross_entropy(activation, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        try:
            for number in range(8):
                plan.begin(number)
                train_step(torch.randn(6, 6), torch.randint(3, (6,)))
        finally:
            gc.enable()
        assert loop.status().undone == 1
    alive = living(log, "begins")
    assert alive == [0] * len(alive)


@pytest.mark.parametrize("stage", ["copy", "survey", "end"])
def test_a_failed_proof_holds_no_memory_while_the_step_is_run_again(stage, monkeypatch):
    copies, (log, note) = [], noting()

    class Watched(trial_run.Snapshot):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            copies.append(weakref.ref(self, lambda _: note("died")))
            note("made")
            if stage == "copy" and len(copies) == 2:
                raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(trial_run, "Snapshot", Watched)
    plan = Plan(Failure(stage if stage != "copy" else "none", 3 if stage == "end" else 1, "memory"))
    shape = Shape(steps=8)
    with planted(plan):
        monkeypatch.setattr(trial_run, "Snapshot", Watched)
        program = Program(shape, "eager+graph", plan)
        program.optimizer.register_step_pre_hook(lambda *_: note("steps"))
        gc.disable()
        try:
            program.train()
        finally:
            gc.enable()
        assert plan.fired or stage == "copy"
        program.loop.close()
    alive = living(log, "steps")
    assert alive[-1] == 0
    assert max(alive) <= 1, "a second copy of the state is held"


def test_saving_the_start_of_a_step_may_run_out_of_memory(monkeypatch):
    """The step has not begun then, and is run as if the tier had failed."""
    shape, real, calls = Shape(accumulates=True, steps=12), Snapshot.save, []

    def full(self, **more):
        calls.extend([1] * ("tensors" in more))  # by a rescue: the start of a step that is no proof
        if len(calls) == 3:
            self.complete = False
            raise torch.OutOfMemoryError("planted while the start of the step was saved")
        real(self, **more)

    monkeypatch.setattr(Snapshot, "save", full)
    with planted(Plan()):
        program = Program(shape, "aot_eager").train()
        left, status = program.left(), program.loop.status()
        program.loop.close()
    same_bits(eager(shape), left)
    assert (status.tier, status.undone) == ("eager", 1)
    assert any("planted while the start" in one.why for one in status.tiers)


class Strange:
    """An object of the user's that does not want to be looked at, from some step on."""

    def __init__(self):
        self.looks = 0
        self.refuses_after = 10**9

    @property
    def __class__(self):
        self.looks += 1
        if self.looks > self.refuses_after:
            raise RuntimeError("planted: do not look at me")
        return Strange

    def factor(self):
        return 1.0


@pytest.mark.parametrize("after", [0, 1, 10, 30, 100])
def test_python_state_that_cannot_be_looked_at_declines_the_capture(after):
    def program(run):
        torch.manual_seed(0)
        model, strange = Net(), Strange()
        strange.refuses_after = after
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
        loop = hotloop.Loop(model, optimizer, run=run) if run else None

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) * strange.factor()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step, losses, draws = loop.step(train_step) if loop else train_step, [], torch.Generator().manual_seed(0)
        for _ in range(14):
            x, y = torch.randn(6, 6, generator=draws), torch.randint(3, (6,), generator=draws)
            losses.append(step(x, y))
        told = str(loop.status().to_dict()) if loop else ""
        if loop:
            loop.close()
        return {"losses": contents(losses), "model": contents(model)}, told

    reference, _ = program(None)
    with planted(Plan()):
        left, told = program("eager+graph")
    same_bits(reference, left)
    assert "cannot be looked at" in told or "planted: do not look" in told, told


@pytest.mark.campaign
@pytest.mark.inductor
def test_an_inductor_kernel_that_dies_is_undone(monkeypatch):
    """The real compiler's code, whose second forward graph fails once it has run for some steps."""
    from hotloop._torch import backends

    shape, plan = Shape(steps=10), Plan(Failure("forward kernel", 6, place=1))
    real = backends.inductor

    def inductor(mode, options, dynamic):
        inner = real(mode, options, dynamic)

        def compiled(graph, inputs):
            run = inner(graph, inputs)

            def failing(*args):
                plan.reach("forward kernel")
                return run(*args)

            return failing

        return compiled

    monkeypatch.setattr(backends, "inductor", inductor)
    program = Program(shape, "default", plan).train()
    left, status = program.left(), program.loop.status()
    program.loop.close()
    assert plan.fired
    assert (status.tier, status.undone) == ("eager", 1)
    # Inductor's own rounding of the steps before and of the proofs' candidates; what ran eagerly is bit-equal.
    torch.testing.assert_close(left["losses"], eager(shape)["losses"], rtol=1e-5, atol=1e-6)
    assert torch.equal(left["random"][0], eager(shape)["random"][0])


def test_a_wrapper_of_the_default_stream_is_told_how_to_be_made():
    from hotloop.step.rescue import obstacle_of

    raised = RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream")
    assert "with torch.cuda.stream(torch.cuda.Stream())" in obstacle_of(raised).hint
