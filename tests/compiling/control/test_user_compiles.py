"""What its user compiled by torch's own means: recognised, told, and given back."""

import pytest
import torch

import hotloop
from hotloop import events as ev
from hotloop._torch.module import get_entry


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).relu()


def test_uncompile_gives_the_users_own_compile_back():
    model = Net()
    model.compile(backend="aot_eager")
    own = get_entry(model)
    hotloop.compile(model, "aot_eager")
    hotloop.compile(model, "none")
    assert get_entry(model) is not own, "none is eager, whatever was compiled before"
    with hotloop.watch() as events:
        model(torch.ones(2, 4))
    assert not [one for one in events if isinstance(one, ev.Compiled)]
    hotloop.uncompile(model)
    assert get_entry(model) is own


def test_uncompile_leaves_what_the_user_compiled_since():
    model = Net()
    hotloop.compile(model, "aot_eager")
    model.compile(backend="aot_eager")
    own = get_entry(model)
    hotloop.uncompile(model)
    assert get_entry(model) is own


def by_user(how):
    model = Net()
    if how == "whole":
        return torch.compile(model, backend="aot_eager")
    if how == "a part":
        model.inner = torch.compile(model.inner, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")
    else:
        model.inner.compile(backend="aot_eager")
    return model


TOLD = {
    "whole": "torch compiled the model",
    "a part": "torch compiled inner",
    "in place": "torch compiled the model",
    "a part in place": "torch compiled inner",
}


@pytest.mark.parametrize("how", TOLD)
def test_the_status_tells_what_the_user_compiled_by_torchs_own_means(how):
    model = by_user(how)
    status = hotloop.status(model).components["model"]
    assert (status.requested, status.running, status.state) == ("none", "as-given", "as-given")
    (cause,) = status.causes
    assert cause.reason.startswith(TOLD[how])
    assert "leave out" in cause.hint
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), run="auto")
    with loop:
        step = loop.step(lambda x: model(x).sum().backward())
        step(torch.ones(2, 4))
        (tier,) = loop.status().tiers
        assert tier.name == "as-given"
        assert tier.why.startswith(TOLD[how])
        assert TOLD[how] in loop.status().decisions[0]
        assert loop.record.document["components"]["model"]["state"] == "as-given"


@pytest.mark.parametrize("how", ["a part", "in place", "a part in place"])
def test_what_is_compiled_over_the_users_own_compile_is_told(how, caplog):
    model = hotloop.compile(by_user(how), "aot_eager")
    model(torch.ones(2, 4))
    status = hotloop.status(model)
    assert TOLD[how] in caplog.text
    assert status.components["model"].state == "compiled"
    assert not status.components["model"].causes


def test_a_model_that_torch_compile_wraps_has_the_status_of_what_hotloop_compiled_in_it():
    model = hotloop.compile(Net(), "aot_eager")
    assert hotloop.status(torch.compile(model, backend="aot_eager")).components["model"].requested == "aot_eager"
