"""The user's own exceptions reach them as from eager: class, message, their own lines; and the model compiles afterwards."""

import copy
import traceback

import pytest
import torch
from compiling_models import Net, one, rows, train
from torch import nn

import hotloop


class Custom(Exception):
    """A class of the user's own, with two arguments."""

    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


class Fussy(nn.Module):
    """Raises on a batch of three, each time in another way."""

    def __init__(self, how):
        super().__init__()
        self.net, self.how = Net(), how

    def forward(self, x):
        x = self.net(x)
        if x.shape[0] == 3:
            return self.fail(x)
        return x

    def fail(self, x):
        if self.how == "value":
            raise ValueError("three rows")
        if self.how == "key":
            return {"a": x}["b"]
        if self.how == "assert":
            assert x.shape[0] != 3, "three rows"
        if self.how == "attribute":
            return self.missing
        if self.how == "custom":
            raise Custom(3, "rows")
        if self.how == "shape":
            return x @ torch.ones(7, 7)
        if self.how == "index":
            return x[7]
        if self.how == "zero":
            return x * (1 // (x.shape[0] - 3))
        if self.how == "not implemented":
            raise NotImplementedError("three rows")
        if self.how == "cause":
            try:
                raise KeyError("inner")
            except KeyError as error:
                raise RuntimeError("outer") from error
        return x


KINDS = ["value", "key", "assert", "attribute", "custom", "shape", "index", "zero", "not implemented", "cause"]


def error_of(model, x):
    try:
        model(x)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def own_lines(error):
    """The user's lines of a traceback: (function, source)."""
    frames = traceback.extract_tb(error.__traceback__)
    return [
        (f.name, f.line)
        for f in frames
        if f.filename == __file__
        and f.name.isidentifier()
        and not f.name.startswith(("error_of", "torch_dynamo_resume"))
    ]


SETTINGS = {"plain": {}, "fullgraph": {"fullgraph": True}, "strict": {"strict": True}}
TRACED = [("plain", how) for how in KINDS]
# Dynamo meets a class of the user's, an assert, what a tensor's operator raises, and what it takes for a lack of its own,
# each in another way; the other kinds go the way of the first.
APART = "custom", "assert", "shape", "not implemented"
TRACED += [(settings, how) for settings in ("fullgraph", "strict") for how in APART]


@pytest.mark.campaign
@pytest.mark.parametrize(("settings", "how"), TRACED)
@pytest.mark.some_of(3)
def test_met_while_tracing(settings, how):
    torch.manual_seed(0)
    model = Fussy(how)
    eager = copy.deepcopy(model)
    hotloop.compile(model, "aot_eager", **SETTINGS[settings])
    expected = error_of(eager, rows(3))
    for _ in range(2):
        error = error_of(model, rows(3))
        assert type(error) is type(expected)
        assert str(error) == str(expected)
        assert error.args == expected.args
        assert own_lines(error) == own_lines(expected)
        assert own_lines(error)
        assert type(error.__cause__) is type(expected.__cause__)
    assert model.net.norm.num_batches_tracked == 2, "the part before the error ran once a call, as in eager"
    reference = copy.deepcopy(model)
    before = one(model).frames_compiled
    train(model, [rows(), rows(5)]).assert_equal(train(reference, [rows(), rows(5)]))
    status = one(model)
    assert status.frames_eager == 0, status
    assert status.frames_compiled == before + 2, "one graph a step: the model was traced anew as a whole"
    gave_up = [cause for cause in status.causes if cause.stage == "trace"]
    assert status.state == ("partial" if gave_up else "compiled"), "a frame that dynamo gave up stays named"
    assert all(cause.file == __file__ for cause in gave_up), gave_up


class Item(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class Printing(nn.Module):
    def forward(self, x):
        x = x.relu()
        torch._dynamo.graph_break()
        return x * 2


@pytest.mark.parametrize("kind", [Item, Printing])
@pytest.mark.parametrize("before", [False, True], ids=["cold", "over compiled code with breaks"])
def test_a_graph_break_under_fullgraph_raises_with_its_place(kind, before):
    model = kind()
    if before:
        hotloop.compile(model, "aot_eager")
        model(rows())
        hotloop.uncompile(model)
    hotloop.compile(model, "aot_eager", fullgraph=True)
    for _ in range(2):
        with pytest.raises(Exception, match=r"test_errors_as_eager.py") as caught:
            model(rows())
        assert type(caught.value).__module__ == "torch._dynamo.exc"
        source = "x.sum().item() > 0" if kind is Item else "graph_break()"
        assert source in str(caught.value)


@torch.library.custom_op("hotloop_tests::fussy", mutates_args=())
def fussy(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 1e6:
        raise ValueError("too large for me")
    return x.clone()


@fussy.register_fake
def _(x):
    return torch.empty_like(x)
