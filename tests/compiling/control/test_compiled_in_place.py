"""A model that was compiled in place is used as an eager one is."""

import copy
import io

import pytest
import torch
from compiling_models import Net, Tied, assert_same, one, rows, tokens, total, train
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hotloop


class Nested(nn.Module):
    """Nested blocks, buffers, one of them not persistent, and a tied weight."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"net": Net(), "tied": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))})
        self.inner["tied"][1].weight = self.inner["tied"][0].weight
        self.register_buffer("hidden", torch.ones(8), persistent=False)

    def forward(self, x):
        return self.inner["tied"](self.inner["net"](x) * self.hidden)


class Pair(Tied):
    """Two blocks are as many as there need to be for one to differ from the other."""

    def __init__(self):
        super().__init__(layers=2)


MODELS = {"tied": (Pair, tokens), "net": (Net, rows), "nested": (Nested, rows)}


@pytest.fixture(params=MODELS)
def case(request):
    """(make a model, a batch for it)."""
    kind, batch = MODELS[request.param]
    torch.manual_seed(0)
    return kind, batch()


def compiled(kind, batch):
    model = hotloop.compile(kind(), "aot_eager")
    total(model(batch)).backward()
    model.zero_grad()
    assert one(model).state == "compiled"
    return model


def test_names_types_and_structure_are_those_of_eager(case):
    kind, batch = case
    eager, model = kind(), compiled(kind, batch)
    assert type(model) is kind
    assert isinstance(model, kind)
    assert list(model.state_dict()) == list(eager.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert [n for n, _ in model.named_buffers()] == [n for n, _ in eager.named_buffers()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in eager.named_modules()]
    assert repr(model) == repr(eager)
    assert bool(model)


def test_deepcopy_is_an_eager_copy_of_its_own(case):
    kind, batch = case
    model = compiled(kind, batch)
    copied = copy.deepcopy(model)
    status = one(copied)
    assert (status.state, status.running) == ("eager", "none")
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert total(copied.eval()(batch)) != total(model.eval()(batch))
    assert one(model).state == "compiled"
    hotloop.compile(copied, "aot_eager")
    copied(batch)
    assert one(copied).state == "compiled"
    assert not one(copied).causes


def test_state_dict_saves_and_loads_as_weights_only(case):
    kind, batch = case
    model = compiled(kind, batch)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    kind().load_state_dict(torch.load(buffer, weights_only=True), strict=True)


@pytest.mark.parametrize("when", ["before", "after"])
def test_full_backward_hooks_on_the_module_run(when):
    model, grads = Net(p=0.0), []

    def add(module):
        module.register_full_backward_hook(lambda m, gin, gout: grads.append(gout[0].detach().clone()))
        module.register_full_backward_pre_hook(lambda m, gout: (gout[0] * 2,))

    if when == "before":
        add(model)
    hotloop.compile(model, "aot_eager")
    if when == "after":
        model(rows())
        add(model)
    reference = copy.deepcopy(model)
    x = rows().requires_grad_()
    train(model, [x]).assert_equal(train(reference, [x]))
    assert len(grads) == 2
    assert_same(grads[0], grads[1])


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_on_a_child_that_is_registered_after_the_compile_runs(kind):
    model, ran = Net(p=0.0), []
    hotloop.compile(model, "aot_eager")
    x = rows().requires_grad_()
    train(model, [x])
    register = getattr(model.norm, f"register_{kind}_hook")
    handle = register(lambda *a: ran.append(kind))
    train(model, [x])
    assert ran == [kind]
    handle.remove()
    train(model, [x])
    assert ran == [kind]
    assert one(model).state == "compiled"


def test_train_and_eval_take_effect():
    model = compiled(Net, rows())
    with torch.no_grad():
        before = model.norm.num_batches_tracked.item()
        model.eval()
        assert_same(model(rows()), model(rows()))
        assert model.norm.num_batches_tracked.item() == before
        model.train()
        assert not torch.equal(model(rows()), model(rows()))
        assert model.norm.num_batches_tracked.item() == before + 2
    model.drop.eval()
    torch.manual_seed(0)
    first = model(rows())
    torch.manual_seed(1)
    assert_same(first, model(rows()))


def test_ema_by_name_and_averaged_model():
    model = compiled(Net, rows())
    average = AveragedModel(model, use_buffers=True)
    shadow = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, [rows(seed=s) for s in range(3)])
    average.update_parameters(model)
    for name, parameter in model.named_parameters():
        shadow[name].lerp_(parameter.detach(), 0.5)
    assert {f"module.{n}" for n in shadow} == {n for n, _ in average.named_parameters()}
    assert_same(average.module.last.weight, model.last.weight)  # its first update copies
    assert_same(average.eval()(rows()), model.eval()(rows()))
    assert one(average.module).state == "eager"
    copied = copy.deepcopy(model)
    missing = copied.load_state_dict(shadow, strict=False)
    assert not missing.unexpected_keys
