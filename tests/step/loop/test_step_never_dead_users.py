"""What is the user's own: their exceptions reach them as they raised them, in every tier and stage, and so do interrupts."""

from __future__ import annotations

import array
import contextlib
import functools
import itertools
import threading

import pytest
import torch
from step_failures import Failure, Plan, planted, same_bits
from step_programs import contents
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev

TIERS = ("eager", "eager+graph", "aot_eager", "aot_eager+graph")
PLACES = ("model", "first", "backward", "optimizer", "end")
STEPS = 14
"""In ``eager+graph`` step 0 is plain, 1 the survey, 2 the warm-up, 3 the capture, 4 and 5 proofs, the rest replays; the
compiled tiers look at step 0, prove their code at steps 1 to 3, and capture after that."""
STAGES = {
    "eager": (0, 10),
    "eager+graph": (0, 1, 2, 3, 4, 5, 10),
    "aot_eager": (0, 1, 2, 3, 10),
    "aot_eager+graph": (4, 5, 6, 10),  # what it does before is what `aot_eager` does
}
"""A step of each stage; one run or replay is like the next."""


EACH = [(tier, at) for tier, steps in STAGES.items() for at in steps]


class Mine(Exception):
    """Holds more than a message."""

    def __init__(self, message, *, code):
        super().__init__(message)
        self.code = code


class Stop(BaseException):
    """No Exception: none of anybody's business but the user's."""


def raising(kind):
    """Raise the user's exception; one comes from another, as theirs do."""
    if kind is Mine:
        try:
            {}["theirs"]
        except KeyError as error:
            raise Mine("mine", code=7) from error
    raise kind("mine")


class Small(nn.Module):
    """What a step leaves in a model: gradients, a buffer that moves, random numbers; and no more, as it is traced often."""

    def __init__(self, fails):
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(5), nn.Dropout(0.25), nn.Linear(5, 3)
        self.fails = fails

    def forward(self, x):
        y = self.drop(self.norm(x))
        if self.fails.get("model"):
            raising(self.fails["model"])
        return self.head(y)


class Hidden:
    """Where to fail, in a place that no look at the program's Python state finds: whether locks are held."""

    def __init__(self):
        self.places = {place: threading.Lock() for place in PLACES}

    def __contains__(self, place):
        return self.places[place].locked()

    def __getitem__(self, _place):
        return Mine

    def __setitem__(self, place, kind):
        assert kind is Mine
        self.places[place].acquire(blocking=False)

    def clear(self):
        for one in self.places.values():
            if one.locked():
                one.release()


class Run:
    """A training run that catches what its steps raise, and goes on."""

    def __init__(self, run, at=None, place=None, kind=Mine, *, skips=None, plan=None, hidden=False):
        torch.manual_seed(0)
        self.raised, self.ran, self.left_there = None, array.array("b"), None  # no plain value of the step
        self.fails = Hidden() if hidden else {}
        self.model = Small({} if hidden else self.fails)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.875, fused=True)
        self.loop = hotloop.Loop(self.model, self.optimizer, run=run) if run else None
        step, draws = self.make_step(), torch.Generator().manual_seed(1)
        step = self.loop.step(step) if run else step
        self.losses = []
        for number in range(STEPS):
            x, y = torch.randn(6, 5, generator=draws), torch.randint(3, (6,), generator=draws)
            if plan is not None:
                plan.begin(number)
            if number == skips:
                continue
            if number == at:
                self.fails[place] = kind
            before = len(self.ran)
            try:
                self.losses.append(step(x, y))
            except BaseException as error:
                self.raised, self.times = error, len(self.ran) - before
                self.left_there = self.state()
            self.fails.clear()
        self.status = self.loop.status() if run else None

    def make_step(self):
        model, optimizer, fails, ran = self.model, self.optimizer, self.fails, self.ran.append

        def train_step(x, y):
            ran(1)
            if "first" in fails:
                raising(fails["first"])
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if "backward" in fails:
                raising(fails["backward"])
            optimizer.step()
            if "optimizer" in fails:
                raising(fails["optimizer"])
            optimizer.zero_grad()
            if "end" in fails:
                raising(fails["end"])
            return loss

        return train_step

    def state(self):
        return {
            "model": contents(self.model),
            "optimizer": contents(self.optimizer),
            "random": torch.get_rng_state(),
        }

    def left(self):
        return {"losses": contents(self.losses), **self.state()}

    def close(self):
        if self.loop is not None:
            self.loop.close()


def ran(*args, **kwargs):
    with planted(kwargs.get("plan") or Plan()):
        run = Run(*args, **kwargs)
        found = run.left()
        run.close()
    return run, found


@functools.lru_cache(maxsize=64)
def eager(at=None, place=None, kind=Mine, skips=None):
    run = Run(None, at, place, kind, skips=skips)
    return run, run.left()


def chain(error):
    """Give an exception and all that a traceback of it would show."""
    found = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


# -- their exceptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("tier", "at"), EACH)
@pytest.mark.some_of(3)
def test_it_reaches_them_as_it_was_raised(tier, at, place):
    """At every stage; before a replay the recording notices that what the step reads has changed, so Python runs."""
    reference, theirs = eager(at, place)
    run, ours = ran(tier, at, place)
    assert type(run.raised) is Mine
    assert run.raised.args == ("mine",)
    assert run.raised.code == 7
    assert (
        [type(one) for one in chain(run.raised)] == [type(one) for one in chain(reference.raised)] == [Mine, KeyError]
    )
    assert run.raised.__context__ is run.raised.__cause__, "no exception of ours is hidden behind it"
    same_bits(reference.left_there, run.left_there)
    same_bits(theirs, ours)


@pytest.mark.parametrize("place", ["first", "backward", "end"])
@pytest.mark.parametrize(
    ("tier", "at"), [(tier, at) for tier, at in EACH if tier != "eager" and (at < 6 or tier == "aot_eager")]
)
@pytest.mark.some_of(3)
def test_it_costs_no_tier(tier, at, place):
    """What eager raises as well says nothing against a tier: it is in force at the end as it was asked for."""
    with hotloop.watch() as events:
        run, ours = ran(tier, at, place, hidden=True)
    _, theirs = eager(at, place)
    assert type(run.raised) is Mine
    same_bits(theirs, ours)
    assert not [one.reason for one in events if isinstance(one, ev.TierDeclined | ev.StepUndone)]
    assert run.loop.tier.name == tier
    assert run.status.undone == 0


@pytest.mark.parametrize(
    "kind", [ValueError, RuntimeError, AssertionError, StopIteration, OSError, torch.OutOfMemoryError]
)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.some_of(3)
def test_classes_that_a_compiler_might_take_for_its_own(tier, kind):
    for at, place in itertools.product([at for at in STAGES[tier] if at in (2, 10)], ("model", "backward")):
        reference, theirs = eager(at, place, kind)
        run, ours = ran(tier, at, place, kind)
        assert type(run.raised) is kind
        assert run.raised.args == ("mine",)
        assert chain(run.raised) == [run.raised]
        assert run.raised.__context__ is None
        same_bits(reference.left_there, run.left_there)
        same_bits(theirs, ours)


def test_a_replay_runs_no_python_so_what_nobody_can_see_is_not_raised():
    """A condition outside of the program's state is asked while the step is recorded and proven, and never again."""
    with planted(Plan()):
        eagerly, replayed = (Run(tier, 10, "first", hidden=True) for tier in ("eager", "eager+graph"))
    assert type(eagerly.raised) is Mine
    assert replayed.raised is None
    assert replayed.status.tier == "eager+graph"
    assert len(replayed.losses) == STEPS
    for one in (eagerly, replayed):
        one.close()


def test_an_optimizer_outside_of_the_recording_raises_as_ever():
    """Between two segments the user's code does run; what it raises there is theirs, though the rest is a replay."""

    class Theirs(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.125})
            self.fails = False

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
                    if self.fails:
                        raise Mine("mine", code=1)

    def train(run):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = Theirs(model.parameters())
        loop = hotloop.Loop(model, optimizer, run=run) if run else None

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step, raised, ran_in = loop.step(train_step) if loop else train_step, [], []
        draws = torch.Generator().manual_seed(1)
        for number in range(14):
            optimizer.fails = number == 10
            try:
                step(torch.randn(6, 5, generator=draws), torch.randint(3, (6,), generator=draws))
            except Exception as error:
                raised.append(error)
                there = contents(model)
            ran_in.append(loop.status().tier if loop else None)
        if loop:
            loop.close()
        return raised, there, contents(model), ran_in

    theirs = train(None)
    with planted(Plan()):
        ours = train("eager+graph")
    assert ours[3][9] == "eager+graph"
    assert [type(one) for one in ours[0]] == [Mine]
    assert chain(ours[0][0]) == ours[0]
    same_bits(theirs[1:3], ours[1:3])


def test_a_step_called_while_an_exception_is_handled_keeps_that_context():
    for tier in TIERS:
        with planted(Plan()):
            model = nn.Linear(5, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            loop = hotloop.Loop(model, optimizer, run=tier)

            @loop.step
            def train_step(x, y):
                raise ValueError("mine")

            for _ in range(4):
                outer = KeyError("theirs")
                with pytest.raises(ValueError, match="mine") as caught:
                    try:
                        raise outer
                    except KeyError:
                        train_step(torch.randn(4, 5), torch.randint(3, (4,)))
                assert caught.value.__context__ is outer
            loop.close()


@pytest.mark.campaign
def test_errors_of_shape_read_as_eager_says_them():
    """An error that torch itself raises in the model is asked of eager, so it has eager's words."""
    texts = {}
    for tier in (None, *TIERS):
        with planted(Plan()):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
            loop = hotloop.Loop(model, optimizer, run=tier) if tier else None

            def train_step(x, y, model=model, optimizer=optimizer):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step = loop.step(train_step) if loop else train_step
            for number in range(12):
                if number in (0, 3, 6, 11):
                    with pytest.raises(RuntimeError) as caught:
                        step(torch.randn(6, 7), torch.randint(3, (6,)))
                    assert len(chain(caught.value)) == 1
                    texts.setdefault(str(caught.value), set()).add(tier)
                else:
                    step(torch.randn(6, 5), torch.randint(3, (6,)))
            if loop:
                loop.close()
    assert list(texts.values()) == [{None, *TIERS}], texts


# -- interrupts ----------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Stop])
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.some_of(3)
def test_an_interrupt_passes_at_once_and_the_loop_goes_on(tier, kind):
    """Not repeated: the state is what it was when it came, or, where a proof was going on, as before the step."""
    steps = [at for at in STAGES[tier] if at in (0, 2, 3, 5, 10)]
    moments = itertools.product(steps, ("first", "backward", "optimizer"))
    # The others are caught by the same lines: each stage of a step once.
    for at, place in moments if kind is KeyboardInterrupt else ((2, "first"), (3, "backward"), (10, "optimizer")):
        run, ours = ran(tier, at, place, kind)
        assert type(run.raised) is kind
        assert run.times == 1
        assert run.raised.__cause__ is None
        assert run.raised.__context__ is None
        stopped, theirs = eager(at, place, kind)
        _, begun_never = eager(skips=at)
        undone = not equal(stopped.left_there, run.left_there)
        same_bits(begun_never if undone else theirs, ours)
        assert run.loop.tier.name == tier


def equal(reference, found):
    with contextlib.suppress(AssertionError):
        same_bits(reference, found)
        return True
    return False


class Interrupted(Failure):
    """A failure that is Ctrl-C."""

    def error(self):
        return KeyboardInterrupt()


INSIDE = [
    *(("copy", 1), ("copy", 2), ("copy", 3), ("copy", 5)),
    *(("begin", 3), ("operation", 3), ("end", 3), ("candidate", 3), ("candidate", 5), ("launch", 4), ("launch", 9)),
]


@pytest.mark.parametrize(("stage", "at"), INSIDE)
def test_an_interrupt_in_our_own_code_leaves_the_step_as_if_it_had_not_begun(stage, at):
    failure = Interrupted(stage, at, place=12 if stage == "operation" else 0)
    plan = Plan(failure)
    run, ours = ran("eager+graph", plan=plan)
    assert failure.fired == [at]
    assert type(run.raised) is KeyboardInterrupt
    _, theirs = eager(skips=failure.fired[0])
    same_bits(theirs, ours)
    assert run.loop.tier.name == "eager+graph"
    assert nothing_is_left_on()


@pytest.mark.parametrize(
    ("stage", "at"),
    [("trace", 1), ("lower", 1), ("compare", 2), *itertools.product(("forward kernel", "backward kernel"), (1, 6))],
)
def test_an_interrupt_in_compiled_code_leaves_the_loop_usable(stage, at):
    failure = Interrupted(stage, at)
    run, _ = ran("aot_eager", plan=Plan(failure))
    assert failure.fired == [at]
    assert type(run.raised) is KeyboardInterrupt
    assert len(run.losses) == STEPS - 1
    assert all(loss.isfinite() for loss in run.losses)
    assert nothing_is_left_on()


def nothing_is_left_on():
    """Tell whether torch is as it was: no mode observes, no capture is pretended, autocast caches."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    told = getattr(torch.cuda.is_current_stream_capturing, "__module__", "")
    return (
        not _get_current_dispatch_mode_stack()
        and told.startswith("torch.")
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager", "aot_eager+graph"])
def test_a_bad_label_at_any_step_leaves_what_eager_leaves(run):
    """The stand-in runs operation by operation, so that one may raise in the middle of a replay, after a BatchNorm."""

    def train(tier):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
        loop = hotloop.Loop(model, optimizer, run=tier) if tier else None

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step, left = loop.step(train_step) if loop else train_step, []
        for number in range(STEPS):
            x, y = torch.randn(6, 4), torch.randint(3, (6,))
            if number > 2:
                with pytest.raises(IndexError):
                    step(x, torch.full_like(y, 50))
            step(x, y)
            left.append((contents(model.state_dict()), torch.get_rng_state().tolist()))
        return left, loop.status().tier if loop else None

    with hotloop.testing.captured_step_emulation():
        ours, tier = train(run)
        same_bits(ours, train(None)[0])
    assert tier == run
