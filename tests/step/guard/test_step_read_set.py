"""What code has read that ran: functions that are changed, results that are kept, and code that nobody hears."""

from __future__ import annotations

import functools
import gc
import mmap
import sys
import types

import changed_aliases
import pytest
import torch
from step_programs import Classifier, batches, plain_step
from test_step_watch import changing, dropped
from torch.nn import functional as F

from hotloop.step.audit.call_monitor import CallMonitor
from hotloop.step.guard import code_reads


class Held:
    def __init__(self):
        self.weight = 1.0


def rebinds():
    weight = 1.0

    def read():
        return weight

    def change():
        nonlocal weight
        weight = -1.0

    return read, change


def other_code():
    def read():
        return 1.0

    def other():
        return -1.0

    return read, lambda: setattr(read, "__code__", other.__code__)


def other_default():
    def read(weight=1.0):
        return weight

    return read, lambda: setattr(read, "__defaults__", (-1.0,))


def other_default_by_name():
    def read(*, weight=1.0):
        return weight

    return read, lambda: read.__kwdefaults__.update(weight=-1.0)


def failed_lookup():
    held = Held()
    return lambda: getattr(held, "other", 1.0), lambda: setattr(held, "other", -1.0)


def result_that_is_kept():
    @functools.lru_cache
    def settings(_name):
        return Held()

    return lambda: settings("first").weight, lambda: setattr(settings("first"), "weight", -1.0)


def view():
    table = {"weight": 1.0}
    values = table.values()
    return lambda: sum(values), lambda: table.update(weight=-1.0)


def bound_to_a_partial():
    held = Held()
    return functools.partial(lambda held: held.weight, held), lambda: setattr(held, "weight", -1.0)


def compiled_by_the_program():
    held = Held()
    held.flips = False

    def flips():
        return held.flips

    @torch.compile(backend="eager")
    def read(x):
        return -x if flips() else x

    one = torch.ones(2)
    return lambda: read(one).mean(), lambda: setattr(held, "flips", True)


def signed_zero():
    held = Held()
    held.weight = 0.0
    return lambda: torch.tensor(1.0).copysign(torch.tensor(held.weight)), lambda: setattr(held, "weight", -0.0)


def global_that_comes_later():
    globals().pop("COMES_LATER", None)

    def read():
        try:
            return COMES_LATER
        except NameError:
            return 1.0

    return read, lambda: globals().update(COMES_LATER=-1.0)


def global_that_hides_a_built_in():
    globals().pop("round", None)
    return lambda: round(1.2), lambda: globals().update(round=lambda _: -1.0)


def module_that_is_loaded_later():
    sys.modules.pop("a_plugin", None)
    module = types.ModuleType("a_plugin")
    return lambda: -1.0 if "a_plugin" in sys.modules else 1.0, lambda: sys.modules.update(a_plugin=module)


def module_without_a_file():
    package = types.ModuleType("configs")
    package.base = types.ModuleType("configs.base")
    package.base.weight = 1.0
    return lambda: package.base.weight, lambda: setattr(package.base, "weight", -1.0)


def class_that_hides_its_base():
    class Base:
        weight = 1.0

    class Derived(Base):
        pass

    held = Derived()
    return lambda: held.weight, lambda: setattr(Derived, "weight", -1.0)


def operator_replaced():
    class Number:
        def __mul__(self, other):
            return other

    number = Number()
    return lambda: number * 1.0, lambda: setattr(Number, "__mul__", lambda self, other: -other)


def attribute_of_a_metaclass():
    meta = type("Meta", (type,), {"weight": 1.0})
    made = meta("Made", (), {})
    return lambda: made.weight, lambda: setattr(meta, "weight", -1.0)


def attribute_of_a_function():
    def read():
        return read.weight

    read.weight = 1.0
    return read, lambda: setattr(read, "weight", -1.0)


def number_of_a_layer_in_a_list():
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    for layer in layers:
        layer.scale = 1.0

    def read():
        total = 1.0
        for layer in layers:
            total *= layer.scale
        return total

    return read, lambda: setattr(layers[0], "scale", -1.0)


def item_that_a_generator_left_out():
    held = [Held() for _ in range(4)]
    for one in held:
        one.counts = one is held[0]
    return lambda: sum(one.weight for one in reversed(held) if one.counts), lambda: setattr(held[3], "counts", True)


def function_of_a_library_replaced():
    F.a_weight = lambda: 1.0
    return lambda: 1.0 * F.a_weight(), lambda: setattr(F, "a_weight", lambda: -1.0)


def distribution():
    zero, one = torch.zeros(()), torch.ones(())
    prior = torch.distributions.Normal(zero, one, validate_args=False)
    return lambda: prior.log_prob(one), lambda: setattr(prior, "loc", one)


def memory_of_a_file():
    memory = mmap.mmap(-1, 8)
    return lambda: 1.0 - memory[0], lambda: memory.__setitem__(0, 2)


READS = [
    signed_zero,
    global_that_comes_later,
    global_that_hides_a_built_in,
    module_that_is_loaded_later,
    module_without_a_file,
    class_that_hides_its_base,
    operator_replaced,
    attribute_of_a_metaclass,
    attribute_of_a_function,
    number_of_a_layer_in_a_list,
    item_that_a_generator_left_out,
    function_of_a_library_replaced,
    distribution,
    memory_of_a_file,
    *(one for name, one in vars(changed_aliases).items() if name.startswith("by_")),
    rebinds,
    other_code,
    other_default,
    other_default_by_name,
    failed_lookup,
    result_that_is_kept,
    view,
    bound_to_a_partial,
]


@pytest.mark.parametrize("make", READS)
def test_a_change_is_in_force_in_the_next_step(both, make):
    def program(run):
        with run.device:
            read, change = make()
        return changing(lambda _: lambda logits, y: F.cross_entropy(logits, y) * read(), lambda *_: change())(run)

    dropped(both, program, "")


def test_what_a_hook_is_given_beside_the_module(both):
    def program(run):
        settings = {"scale": 1.0}

        def make(model):
            hook = functools.partial(lambda _module, _given, out, settings: out * settings["scale"], settings=settings)
            model.head.register_forward_hook(hook)
            return F.cross_entropy

        return changing(make, lambda *_: settings.update(scale=0.5))(run)

    dropped(both, program, "a hook of")


class Counts:
    """A callback, or a state, whose number of steps code outside of the step moves."""

    def __init__(self):
        self.step, self.weight = 0, 0.5

    def on_loss(self, loss):
        return self.weight * loss


def by_callbacks(counts, names=("on_loss", "on_nothing")):
    def called(name, loss):
        for callback in [counts]:
            if hasattr(callback, name):
                loss = getattr(callback, name)(loss)
        return loss

    return lambda loss: called(names[1], called(names[0], loss))


def by_attribute(counts):
    return lambda loss: counts.weight * loss


@pytest.mark.parametrize("make", [by_callbacks, by_attribute])
def test_what_only_has_the_name_of_something_else_is_not_read(both, make):
    """The step calls ``optimizer.step()``, and reads other attributes of ``counts`` by name: not ``counts.step``."""

    def program(run):
        model, counts = Classifier().to(run.device), Counts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        weighted = make(counts)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = weighted(F.cross_entropy(model(x), y)) * counts.weight
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
            counts.step += 1
        return model, optimizer

    assert not both.equal(program, exact=True).dropped


@pytest.mark.parametrize("ask", [gc.get_objects, sys._getframe, torch.get_num_threads, Held.__subclasses__])
def test_what_a_step_asks_of_python_itself_is_declined(both, ask):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) * (1.0 if ask() else 2.0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = run.loop(model, optimizer).step(train_step)
        for x, y in batches(run.device, 6):
            run.note(step(x, y))
        return model

    both.declines(program, reason=f"the step asks Python ({ask.__name__})")


def scaling(function, held):
    def scaled(*args, **keywords):
        return function(*args, **keywords) * held.weight

    return scaled


@pytest.mark.parametrize("ours", [True, False])
def test_a_librarys_function_that_the_program_replaced(both, monkeypatch, ours):
    """No name of the step leads to what it closes over. Other functions made in the same place are none of the step's."""

    def program(run):
        held, others = Held(), [Held() for _ in range(5)]
        made = [scaling(F.relu, one) for one in others]
        monkeypatch.setattr(F, "softplus", scaling(torch.nn.functional.silu, held))
        changed = held if ours else others[0]
        ended = changing(
            lambda _: lambda logits, y: F.cross_entropy(F.softplus(logits), y),
            lambda *_: setattr(changed, "weight", 2.0),
        )(run)
        assert len(made) == 5
        return ended

    run = both.equal(program, exact=True, replays=6)
    assert len(run.dropped) == ours
    assert all("held" in one and "weight" in one for one in run.dropped)


def test_what_compiled_code_of_the_program_reads_is_noticed(both):
    """Nobody hears the functions that it has taken in. Compiled anew, it draws numbers to see what it compiles."""

    def program(run):
        with run.device:
            read, change = compiled_by_the_program()
        return changing(lambda _: lambda logits, y: F.cross_entropy(logits, y) * read(), lambda *_: change())(run)

    assert "flips" in both.alike(program).dropped[0]


class Scaled(Classifier):
    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def scaled(self, x):
        return x * self.factor

    def forward(self, x):
        return self.scaled(super().forward(x))


@pytest.mark.campaign
def test_what_a_model_reads_that_was_compiled_before(both):
    def program(run):
        model = Scaled().to(run.device)
        model.compile(backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for number, (x, y) in enumerate(batches(run.device, 26)):
            if number == 14:
                model.factor = -1.0
            run.note(step(x, y))
        return model, optimizer

    _, eager = both.run(program)
    run, ours = both.run(program, "eager+graph")
    for theirs, our in zip(eager["result"], ours["result"], strict=True):
        torch.testing.assert_close(our, theirs)
    assert not run.replays() or any("factor" in one for one in run.dropped)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a profiler leaves room for others")
def test_under_a_profiler_nothing_is_captured(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            sys.setprofile(lambda *_: None)
            try:
                run.note(step(x, y))
            finally:
                sys.setprofile(None)
        return model, optimizer

    told = both.declines(program, reason="a profiler has the place")
    assert "end the profiler" in told.hint


def test_a_tensor_that_nobody_named_is_among_what_a_step_changes_from_the_second_audit_on(both):
    def program(run):
        norm = torch.nn.BatchNorm1d(8, affine=False).to(run.device)
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(norm(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer, norm

    run = both.equal(program, exact=True, replays=10)
    audits = [one for one in run.loops[0].record.document["steps"] if one.get("doing") == "survey"]
    assert len(audits) == 2


def test_what_functions_return_and_generators_yield_is_heard():
    def numbers():
        yield 1
        yield 2

    began, ended = [], []
    calls = CallMonitor(
        frozenset(),
        lambda *_: None,
        lambda code, _: began.append(code.co_name) is None,
        lambda code, _, value: ended.append((code.co_name, value)),
    )
    with calls.heard():
        found = list(numbers())
    assert calls.complete
    assert found == [1, 2]
    assert began.count("numbers") == 3
    assert [value for name, value in ended if name == "numbers"] == [1, 2, None]


def test_what_a_generator_expression_runs_over_is_looked_at_once(both, monkeypatch):
    """It was looked at with each item: a step that read 40,000 numbers of a text stood still for 85 seconds."""
    text, looked, real = ",".join(["0.5"] * 300), [], gc.get_referents
    listed = types.SimpleNamespace(**{name: getattr(gc, name) for name in ("get_referrers", "is_tracked")})
    listed.get_referents = lambda value: looked.append(found := real(value)) or found
    monkeypatch.setattr(code_reads, "gc", listed)

    def reads(_):
        return lambda logits, y: F.cross_entropy(logits, y) * sum(float(one) for one in text.split(",")) / 300

    both.equal(changing(reads, lambda *_: None), exact=True, replays=6)
    # Of this text alone: a callback that happens to run in the step may hold whatever earlier tests have left.
    assert sum(one == "0.5" for found in looked for one in found if type(one) is str) < 10 * 300
