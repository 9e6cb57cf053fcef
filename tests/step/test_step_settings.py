"""A loop's arguments, ``run="eager"``, and ``HOTLOOP_DISABLE``."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, STEPS, Classifier, batches, plain_step

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.runner import Runner
from hotloop.testing import captured_step_emulation


def parts():
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


@pytest.mark.parametrize("name", [f"{__file__}:parts", f"{__file__}:Runner", "step_programs:batches"])
def test_a_workload_that_is_there_is_not_run_for_it(name):
    hotloop.Loop(*parts(), workload=name).close()


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
    "no optimizer": (lambda model, optimizer: hotloop.Loop(model, None), "optimizer: .* got NoneType"),
    "a scheduler": (
        lambda model, optimizer: hotloop.Loop(model, torch.optim.lr_scheduler.ConstantLR(optimizer)),
        "optimizer: .* got ConstantLR",
    ),
    "run": (lambda model, optimizer: hotloop.Loop(model, optimizer, run="eagre"), "run 'eagre'.*eager"),
    "run's suffix": (lambda model, optimizer: hotloop.Loop(model, optimizer, run="eager+graf"), "run 'eager.graf'"),
    "run's type": (lambda model, optimizer: hotloop.Loop(model, optimizer, run=None), "run None: expected 'auto'"),
    "total_steps": (lambda model, optimizer: hotloop.Loop(model, optimizer, total_steps=0), "total_steps 0"),
    "total_steps' type": (lambda model, optimizer: hotloop.Loop(model, optimizer, total_steps=1e5), "total_steps"),
    "a workload that is no file": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload="nowhere.py:make"),
        "workload 'nowhere.py:make': there is no file",
    ),
    "a workload that is no function": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload=f"{__file__}:nobody"),
        "has no function 'nobody'",
    ),
    "a workload that is no module": (
        lambda model, optimizer: hotloop.Loop(model, optimizer, workload="nowhere.at.all:make"),
        "there is no module 'nowhere.at.all'",
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


def plain(run="eager"):
    model, optimizer = parts()
    return hotloop.Loop(model, optimizer, run=run), plain_step(model, optimizer), model


def forbid(monkeypatch):
    def never(*_args, **_kwargs):
        raise AssertionError("a step that runs eager is looked after")

    monkeypatch.setattr(Runner, "run", never)


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
        (optimizer,) = loop.holdings.optimizers.values()
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
        assert loop.plain
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
