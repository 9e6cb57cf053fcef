"""A loop's arguments, ``run="eager"``, and ``HOTLOOP_DISABLE``."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from step_programs import GRAPH, STEPS, Classifier, batches, plain_step
from torch import nn

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.loop.runner import StepRunner
from hotloop.testing import captured_step_emulation


def parts():
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def empty():
    optimizer = torch.optim.SGD([torch.zeros(1)])
    optimizer.param_groups.clear()
    return optimizer


WRONG = {
    "model": (lambda model, optimizer: hotloop.Loop(optimizer, optimizer), "model: expected a torch Module"),
    "a function as model": (lambda model, optimizer: hotloop.Loop(model.forward, optimizer), "model: expected"),
    "no model": (lambda model, optimizer: hotloop.Loop([], optimizer), "model: .* got an empty sequence"),
    "one of several": (lambda model, optimizer: hotloop.Loop([model, None], optimizer), "model: .* got NoneType"),
    "optimizer": (lambda model, optimizer: hotloop.Loop(model, model), "optimizer: expected a torch Optimizer"),
    "one optimizer of several": (lambda model, optimizer: hotloop.Loop(model, [optimizer, None]), "got NoneType"),
    "a scheduler": (
        lambda model, optimizer: hotloop.Loop(model, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        "optimizer: .* got ConstantLR",
    ),
    "run": (lambda model, optimizer: hotloop.Loop(model, optimizer, run="eagre"), "run 'eagre'.*eager"),
    "run's suffix": (lambda model, optimizer: hotloop.Loop(model, optimizer, run="eager+graf"), "run 'eager.graf'"),
    "run's type": (lambda model, optimizer: hotloop.Loop(model, optimizer, run=None), "run None: expected 'auto'"),
    "total_steps": (lambda model, optimizer: hotloop.Loop(model, optimizer, total_steps=0), "total_steps 0"),
    "total_steps' type": (lambda model, optimizer: hotloop.Loop(model, optimizer, total_steps=1e5), "total_steps"),
    "a workload itself": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload=parts),
        "workload of type function: expected the name of a function .* workload='train.py:make'",
    ),
    "a workload without a function": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload="train.py"),
        "workload 'train.py': expected FILE.py:function or module:function, such as",
    ),
    "a workload that is no file": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload="nowhere.py:make"),
        "workload 'nowhere.py:make': there is no file",
    ),
    "a record below a file": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, record=f"{__file__}/record"),
        "record '.*/record': expected a folder, got .*leave record out",
    ),
    "one model twice": (
        lambda model, optimizer: hotloop.Loop([model, model], optimizer),
        r"model: 'model\[0\]' and 'model\[1\]' are one object: name each Module once",
    ),
    "one optimizer twice": (
        lambda model, optimizer: hotloop.Loop(model, {"first": optimizer, "other": optimizer}),
        "optimizer: 'first' and 'other' are one object",
    ),
    "a bool": (lambda model, optimizer: hotloop.Loop(model, optimizer, total_steps=True), "total_steps True"),
    "a graph on a CPU": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, run=GRAPH),
        "run 'eager.graph': whole steps can be captured on a GPU only.*run='eager'",
    ),
    "no parameters": (lambda model, optimizer: hotloop.Loop(torch.nn.ReLU(), empty()), "model: it has no parameters"),
    "a step that is none": (lambda model, optimizer: hotloop.Loop(model, optimizer, run="eager").step(3), "got int"),
    "a state that is none": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, run="eager").load_state_dict({"model": {}}),
        "load_state_dict",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_by_name(what):
    make, message = WRONG[what]
    with pytest.raises(ConfigError, match=message):
        make(*parts())


def test_no_state_may_be_said_by_none():
    model, optimizer = parts()
    hotloop.Loop(model, optimizer, run="eager", state=None).close()
    assert hotloop.Workload(model, optimizer, lambda x: x, [], state=None).holdings().state == ()


def test_an_optimizer_of_another_model_is_told(caplog):
    (model, _), (_, optimizer) = parts(), parts()
    hotloop.Loop(model, optimizer, run="eager").close()
    (line,) = caplog.messages
    assert line.startswith("optimizer (AdamW): none of its parameters is one of model (Classifier): give")


class Held:
    def __init__(self, one):
        self.one = one


@pytest.mark.parametrize("how", ["the model's", "several", "frozen", "a module's in state", "in state"])
def test_an_optimizer_of_what_the_loop_has_is_not_told(caplog, how):
    (model, optimizer), (other, others) = parts(), parts()
    free = torch.nn.Parameter(torch.zeros(3))
    made = {
        "the model's": lambda: hotloop.Loop(model, optimizer, run="eager"),
        "several": lambda: hotloop.Loop([model, other], [optimizer, others], run="eager"),
        "frozen": lambda: hotloop.Loop([model, other], optimizer, run="eager"),
        "a module's in state": lambda: hotloop.Loop(model, others, run="eager", state=other),
        "in state": lambda: hotloop.Loop(model, torch.optim.SGD([free]), run="eager", state=Held(free)),
    }[how]()
    made.close()
    assert not caplog.messages


@pytest.mark.parametrize("asked", ["full+graph", "Regional+Graph", "autotune+graph", "inductor+graph"])
def test_kernels_that_the_stand_in_cannot_replay_are_refused_before_any_work(asked):
    with captured_step_emulation(), pytest.raises(ConfigError, match=r"Inductor makes.*run='aot_eager.graph' can be"):
        hotloop.Loop(*parts(), run=asked)


def test_auto_leaves_kernels_that_cannot_be_replayed_out():
    with captured_step_emulation(), hotloop.Loop(*parts()) as loop:
        assert [name for name in loop.policy.candidates.names() if name.endswith("+graph")] == [GRAPH]


def plain(run="eager"):
    model, optimizer = parts()
    return hotloop.Loop(model, optimizer, run=run), plain_step(model, optimizer), model


def forbid(monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("a step that runs eager is looked after")

    monkeypatch.setattr(StepRunner, "run", never)


def test_eager_calls_the_function_itself(monkeypatch):
    forbid(monkeypatch)
    loop, _, _ = plain()
    heard, answer = [], object()

    @loop.step
    def train_step(*args, **kwargs):
        """A step."""
        heard.append((args, kwargs))
        return answer

    batch = {"x": torch.ones(2)}
    assert train_step(batch, scale=2) is answer
    ((args, kwargs),) = heard
    assert args[0] is batch
    assert kwargs == {"scale": 2}
    assert (train_step.__name__, train_step.__doc__) == ("train_step", "A step.")
    assert loop.status().tier == "eager"
    assert loop.status().step == 1


@pytest.mark.parametrize("disabled", [False, True])
def test_eager_has_a_row_with_its_steps(monkeypatch, disabled):
    if disabled:
        monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    loop, step, _ = plain("full" if disabled else "eager")
    loop.load_state_dict({"steps": 100})  # those before are in none of its rows
    train_step = loop.step(step)
    for done in (3, 5):
        for x, y in batches("cpu", done):
            train_step(x, y)
        (row,) = loop.status().tiers
        assert (row.name, row.state, row.steps) == ("eager", "in force", {3: 3, 5: 8}[done])
    assert (loop.status().tier, loop.status().step) == ("eager", 108)


def test_a_name_that_there_is_not_is_told_with_all_that_there_are():
    with pytest.raises(ConfigError, match=r"\bautotune, autotune\+graph\b"):
        hotloop.Loop(*parts(), run="nonsense")
    with pytest.raises(ConfigError, match=r"\bautotune, autotune\+graph\b"):
        hotloop.Loop(*parts(), run=None)


def test_eager_lets_an_exception_pass(monkeypatch):
    forbid(monkeypatch)
    loop, _, _ = plain()

    @loop.step
    def train_step():
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        train_step()


@pytest.mark.parametrize("value", ["1", "true", "YES"])
@pytest.mark.parametrize("asked", ["auto", GRAPH, "full", "inductor"])
def test_disabled_by_the_environment_everything_runs_eager(monkeypatch, asked, value):
    forbid(monkeypatch)
    monkeypatch.setenv("HOTLOOP_DISABLE", value)
    loop, step, model = plain(asked)
    train_step = loop.step(step)
    before = model.head.weight.detach().clone()
    for x, y in batches("cpu", 3):
        train_step(x, y)
    assert loop.status().tier == "eager"
    assert not torch.equal(model.head.weight, before)


def test_disabled_by_the_environment_a_name_that_there_is_not_is_refused_all_the_same(monkeypatch):
    monkeypatch.setenv("HOTLOOP_DISABLE", "1")
    with pytest.raises(ConfigError, match=r"run 'eagre'.*eager"):
        hotloop.Loop(*parts(), run="eagre")


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_not_disabled_by_a_value_that_says_no(monkeypatch, value):
    monkeypatch.setenv("HOTLOOP_DISABLE", value)
    with captured_step_emulation():
        loop, step, _ = plain(GRAPH)
        train_step = loop.step(step)
        for x, y in batches("cpu", 8):
            train_step(x, y)
        assert loop.status().tier == GRAPH
        loop.close()


@pytest.mark.parametrize("name", ["Eager+Graph", " eager+graph "])
def test_a_tier_is_named_in_any_case(name):
    with captured_step_emulation():
        loop, _, _ = plain(name)
        assert loop.status().asked == GRAPH


def test_a_closed_loop_runs_steps_eager_and_leaves_nothing_behind():
    with captured_step_emulation():
        loop, step, model = plain(GRAPH)
        (optimizer,) = loop.context.holdings.optimizers.values()
        train_step = loop.step(step)
        data = list(batches("cpu", STEPS))
        for x, y in data[:10]:
            train_step(x, y)
        loop.close()
        loop.close()
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_state_dict_post_hooks
        before = model.head.weight.detach().clone()
        for x, y in data[10:]:
            assert train_step(x, y).grad_fn is not None
        assert not torch.equal(model.head.weight, before)


def test_a_loop_is_a_context_manager_that_closes_also_when_the_program_fails():
    with captured_step_emulation():
        loop, step, _ = plain(GRAPH)
        with pytest.raises(KeyError, match="own"), loop:
            loop.step(step)(*next(batches("cpu")))
            raise KeyError("own")
        assert loop.bypassed
        assert loop.record.document["status"] != "running"


def test_a_status_is_a_table_and_json():
    import json

    with captured_step_emulation():
        loop, step, _ = plain(GRAPH)
        train_step = loop.step(step)
        for x, y in batches("cpu"):
            train_step(x, y)
        status = loop.status()
        loop.close()
    assert json.loads(json.dumps(status.to_dict()))["tier"] == GRAPH
    text = str(status)
    assert text.startswith("hotloop: eager+graph at step 20")
    assert "in force" in text


def test_two_loops_that_own_one_optimizer_are_named(caplog):
    model, optimizer = parts()
    with hotloop.Loop(model, optimizer, run="aot_eager"), hotloop.Loop(model, optimizer) as second:
        assert "AdamW" in caplog.text
        assert "Loop(tier='aot_eager', steps=0) and Loop(tier='eager', steps=0)" in caplog.text
        assert second.status().asked == "auto"


def test_loops_with_an_optimizer_each_and_one_after_another_are_not_spoken_of(caplog):
    model, optimizer = parts()
    with (
        hotloop.Loop(model, optimizer, run="aot_eager"),
        hotloop.Loop(model, parts()[1], run="aot_eager"),  # a discriminator's, say
        hotloop.Loop(model, optimizer, run="eager"),
    ):
        pass
    hotloop.Loop(model, optimizer).close()
    assert "two loops" not in caplog.text


def test_numpys_whole_numbers_are_whole_numbers():
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.125), total_steps=np.int64(5))
    assert loop.context.total_steps == 5
    assert type(loop.context.total_steps) is int


def test_what_is_handed_over_in_the_wrong_place_or_as_a_class_is_told():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with pytest.raises(ConfigError, match=r"got the class SGD: hand over one that was made of it, SGD\(\.\.\.\)"):
        hotloop.Loop(model, torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"got SGD \(the model comes first, then the optimizer\)"):
        hotloop.Loop(optimizer, model)


@pytest.mark.parametrize("copies", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_loop_is_not_copied(copies):
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.125))
    with pytest.raises(TypeError, match=r"a hotloop.Loop is neither pickled nor copied.*keep loop.state_dict\(\)"):
        copies([loop] if copies is copy.deepcopy else loop)


def test_a_report_wants_a_files_name(tmp_path):
    model = nn.Linear(4, 1)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.125))
    for wrong in (3, tmp_path):
        with pytest.raises(ConfigError, match=r"loop\.report: .*: expected the name of the page's file"):
            loop.report(wrong)
