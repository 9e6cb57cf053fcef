"""Ways to call, copy and hold a compiled model that are not the usual one; each once went wrong."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torch.fx.experimental.proxy_tensor import make_fx

import hotloop
from hotloop import presets

ROWS = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return torch.tanh(self.layer(x))


def status(model):
    return hotloop.status(model).components["model"]


@hotloop.compile
def decorated(x):
    return x * 2


def test_a_copy_of_a_model_with_a_compiled_method_has_weights_of_its_own():
    model = Net()
    model.forward = hotloop.compile(model.forward, "aot_eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(ROWS).abs().sum() == 0
    assert model(ROWS).abs().sum() > 0


def test_a_compiled_function_copies_to_itself_and_pickles_by_name():
    assert copy.deepcopy(decorated) is decorated
    assert pickle.loads(pickle.dumps(decorated)) is decorated


def test_a_compiled_callable_object_keeps_its_attributes():
    class Scale:
        def __init__(self):
            self.by = 3.0

        def reset(self):
            self.by = 1.0

        def __call__(self, x):
            return x * self.by

    inner = Scale()
    scale = hotloop.compile(inner, "aot_eager")
    assert scale.by == 3.0
    scale.reset()
    assert torch.equal(scale(ROWS), ROWS)


def test_lazy_modules_compile():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    hotloop.compile(model, "aot_eager")
    assert model(ROWS).shape == (2, 3)
    assert model(ROWS).shape == (2, 3)


def test_an_extra_repr_that_raises_is_no_reason_to_die():
    class Shy(Net):
        def extra_repr(self):
            return self.set_in_forward

    model = hotloop.compile(Shy(), "aot_eager")
    assert model(ROWS).shape == (2, 4)
    assert status(model).state == "compiled"


def test_a_class_is_no_model():
    with pytest.raises(hotloop.errors.ConfigError, match=r"the class Net: hand over an instance, Net\("):
        hotloop.compile(Net, "aot_eager")


@pytest.mark.parametrize("flag", ["strict", "fullgraph"])
def test_flags_are_true_or_false(flag):
    with pytest.raises(hotloop.errors.ConfigError, match=f"{flag} 'no': expected True or False"):
        hotloop.compile(Net(), "aot_eager", **{flag: "no"})


def test_component_names_are_strings():
    with pytest.raises(hotloop.errors.ConfigError, match=r"component names \[1\]"):
        hotloop.compile({1: Net()}, "aot_eager")


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


@pytest.mark.parametrize("name", presets.NAMES)
def test_presets_pickle_and_copy(name):
    preset = presets.get(name)
    assert pickle.loads(pickle.dumps(preset)) == preset
    assert copy.deepcopy(preset) == preset


def test_a_package_is_installed_wherever_an_installer_put_it(tmp_path):
    """pip install --target: the folder's name tells nothing, and its code must not be taken for the user's."""
    from hotloop._torch import graphs

    for name in ("theirs", "mine"):
        (tmp_path / name).mkdir()
    note = tmp_path / "theirs-1.0.dist-info" / "RECORD"
    note.parent.mkdir()
    note.write_text("theirs/__init__.py,sha256=,0\ntheirs/models/unet.py,,\n")
    assert not graphs.is_own_file(str(tmp_path / "theirs" / "models" / "unet.py"))
    assert graphs.is_own_file(str(tmp_path / "mine" / "train.py"))
    assert graphs.is_own_file(str(tmp_path / "train.py"))
