"""Ways to call, copy and hold a compiled model that are not the usual one; each once went wrong."""

import torch
from torch import nn
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

import hotloop

ROWS = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def status(model):
    return hotloop.status(model).components["model"]


def test_lazy_modules_compile():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    hotloop.compile(model, "aot_eager")
    assert model(ROWS).shape == (2, 3)
    assert model(ROWS).shape == (2, 3)


def test_one_call_under_a_transform_leaves_the_model_compiled():
    model = hotloop.compile(Net(), "aot_eager")
    weights = dict(model.named_parameters())
    expected = grad(lambda w: functional_call(Net(), w, (ROWS,)).sum())(weights)
    found = grad(lambda w: functional_call(model, w, (ROWS,)).sum())(weights)
    assert all(torch.equal(found[name], expected[name]) for name in weights)
    model(ROWS)
    assert (status(model).state, status(model).frames_compiled, status(model).frames_eager) == ("partial", 1, 1)


def test_a_call_that_another_tracer_sees_runs_eager_and_is_counted():
    model = hotloop.compile(Net(), "aot_eager")
    traced = make_fx(model)(ROWS)
    assert torch.equal(traced(ROWS), torch.tanh(model.layer(ROWS)))
    model(ROWS)
    assert (status(model).state, status(model).frames_compiled, status(model).frames_eager) == ("partial", 1, 1)
