"""A loop whose tier computes convolutions channels last: in the step alone, and nothing of the model changes."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch.module import get_entry
from hotloop.errors import ConfigError
from hotloop.step import layout
from hotloop.testing import captured_step_emulation

WAYS = ["channels_last", "channels_last+graph"]


def build(kind=nn.Conv2d, pool=nn.AdaptiveAvgPool2d):
    torch.manual_seed(0)
    # Without a bias: before a BatchNorm its gradient is all rounding, of which Adam makes whole steps.
    return nn.Sequential(
        *(kind(3, 6, 3, bias=False), nn.ReLU(), kind(6, 6, 3, bias=False, groups=2), nn.ReLU(), kind(6, 4, 1)),
        *(pool(1), nn.Flatten(), nn.Linear(4, 4)),
    )


OPTIMIZERS = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2**-7, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2**-5, momentum=0.5, fused=True),
}


class Run:
    """A training run that can be looked at between its steps."""

    def __init__(self, run, model=None, optimizer="fused adamw", *, every=1, shape=(4, 3, 8, 8), **settings):
        self.model = build() if model is None else model
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.loop = hotloop.Loop(self.model, self.optimizer, run=run, **settings)
        self._data, self._shape, self.losses, self.average = torch.Generator().manual_seed(1), shape, [], None

        @self.loop.step
        def step(x, y, update):
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            if update:
                self.optimizer.step()
                self.optimizer.zero_grad()
            return loss

        self._step, self._every = step, every

    def train(self, steps):
        for index in range(steps):
            x = torch.randn(self._shape, generator=self._data)
            y = torch.randint(0, 4, self._shape[:1], generator=self._data)
            self.losses.append(self._step(x, y, index % self._every == self._every - 1).item())
        return self

    def assert_untouched(self):
        """Nothing of the model, its gradients or its optimizer has another layout, or anything of ours."""
        state = [one for entry in self.optimizer.state.values() for one in entry.values()]
        for one in (*self.model.parameters(), *self.model.state_dict().values(), *state):
            assert one.is_contiguous()
            assert one.grad is None or one.grad.is_contiguous()
        assert not [module for module in self.model.modules() if get_entry(module) is not None]
        assert not [module for module in self.model.modules() if module._forward_pre_hooks]


@contextlib.contextmanager
def stand_in(run):
    with captured_step_emulation() if run.endswith("+graph") else contextlib.nullcontext():
        yield


def assert_alike(ours, theirs):
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert list(ours.model.state_dict()) == list(theirs.model.state_dict())
    for mine, other in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)


class Looks(nn.Module):
    """Notes the layouts that it meets."""

    def __init__(self):
        super().__init__()
        self.met = []

    def forward(self, x):
        self.met.append(x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous())
        return x


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("run", WAYS)
def test_it_trains_as_eager_does_and_leaves_the_model_as_it_is(run, optimizer):
    eager = Run("eager", optimizer=optimizer).train(30)
    with stand_in(run):
        ours = Run(run, optimizer=optimizer)
        for _ in range(30):
            ours.train(1).assert_untouched()
        assert ours.loop.tier.name == run
        assert ours.loop.last_ran() == (run, "run")
        ours.loop.close()
    assert_alike(ours, eager)


def test_convolutions_return_it_while_the_block_runs():
    model, x = build(), torch.randn(4, 3, 8, 8)
    model[1], model[3] = Looks(), Looks()
    with layout.channels_last(model.modules()):
        model(x)
    model(x)
    assert model[1].met == model[3].met == [True, False]


def test_a_step_that_raises_leaves_nothing_behind():
    ours = Run("channels_last").train(12)
    with pytest.raises(RuntimeError, match="expected input"):
        ours._step(torch.randn(4, 5, 8, 8), torch.zeros(4, dtype=torch.int64), True)
    ours.assert_untouched()
    assert ours.train(2).loop.tier.name == "channels_last"


@pytest.mark.parametrize("run", WAYS)
def test_gradients_that_are_accumulated_are_eagers(run):
    eager = Run("eager", every=3).train(35)
    with stand_in(run):
        ours = Run(run, every=3).train(35)
        ours.assert_untouched()
    torch.testing.assert_close(ours.model[0].weight.grad, eager.model[0].weight.grad, rtol=1e-4, atol=1e-5)
    assert_alike(ours, eager)


@pytest.mark.parametrize("run", WAYS)
def test_volumes_are_laid_out_too(run):
    model = build(nn.Conv3d, nn.AdaptiveAvgPool3d)
    eager = Run("eager", copy.deepcopy(model), shape=(2, 3, 6, 6, 6)).train(20)
    with stand_in(run):
        ours = Run(run, model, shape=(2, 3, 6, 6, 6)).train(20)
        assert ours.loop.tier.name == run
        ours.assert_untouched()
    assert_alike(ours, eager)


def test_weights_that_the_program_replaces_are_used_and_left_alone():
    """As an exchange with averaged weights does for an evaluation."""
    eager, others = Run("eager", optimizer="sgd"), []
    with captured_step_emulation():
        ours = Run("channels_last+graph", optimizer="sgd")
        for run in (ours, eager):
            run.train(15)
            weight = run.model[0].weight
            other = torch.full(weight.shape, 0.125)
            weight.data, other = other, weight.data
            run.train(10)
            others.append(other.clone())
            weight.data, other = other, weight.data
            run.train(10)
        ours.loop.close()
    torch.testing.assert_close(*others, rtol=1e-4, atol=1e-5)
    assert_alike(ours, eager)


def test_one_module_in_two_places_is_laid_out_once():
    model = build()
    model[0] = model[2] = nn.Conv2d(3, 3, 3, bias=False)
    model[4] = nn.Conv2d(3, 4, 1)
    eager, ours = Run("eager", copy.deepcopy(model)), Run("channels_last", model)
    assert_alike(ours.train(20), eager.train(20))
    assert ours.loop.tier.name == "channels_last"


def in_one_memory(model):
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())


def of_a_subclass(model):
    class Own(nn.Parameter):
        pass

    model[0].weight = Own(model[0].weight.data)


def with_two_owners(model):
    model.register_buffer("mirror", model[0].weight.data, persistent=False)


@pytest.mark.parametrize("change", [in_one_memory, of_a_subclass, with_two_owners])
def test_weights_of_any_kind_may_be_behind_it(change):
    ours, eager = Run("channels_last", build(), "sgd"), Run("eager", build(), "sgd")
    change(ours.model)
    change(eager.model)
    for run in (ours, eager):
        run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
        run.train(20)
    assert ours.loop.tier.name == "channels_last"
    assert_alike(ours, eager)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: build().to(memory_format=torch.channels_last), "the convolutions' weights are channels last already"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4)),
            "no convolution of the models has a kernel larger than 1",
        ),
    ],
)
def test_what_cannot_be_laid_out_runs_as_it_is_with_the_reason(make, why, caplog):
    ours = Run("channels_last", make(), "sgd").train(5)
    assert ours.loop.tier.name == "eager"
    assert ours.loop.bypassed
    assert ours.loop.record.document["decisions"][-1]["reason"] == f"channels_last: {why}: steps run eager"
    assert why in caplog.text


def test_a_step_that_needs_the_strides_is_declined_with_its_line():
    class Viewed(nn.Module):
        def forward(self, x):
            return x.view(len(x), -1)

    ours = Run("channels_last", nn.Sequential(*build()[:3], Viewed(), nn.Linear(96, 4)))
    ours.train(6)
    assert ours.loop.tier.name == "eager"
    why = next(tier.why for tier in ours.loop.status().tiers if tier.name == "channels_last")
    assert "view size is not compatible" in why


def test_an_unknown_layout_is_refused_with_the_names_that_there_are():
    with pytest.raises(ConfigError, match=r"run 'channels_first'.*channels_last"):
        Run("channels_first")
    with pytest.raises(ConfigError, match=r"run 'channels_last\+graph': whole steps can be captured on a GPU only"):
        Run("channels_last+graph")


def test_other_random_numbers_than_eagers_are_no_layout():
    def with_dropout():
        model = build()
        model[1] = nn.Dropout(0.5)
        return model

    ours, eager = Run("channels_last", with_dropout()), Run("eager", with_dropout())
    for run in (ours, eager):
        torch.manual_seed(3)
        run.train(12)
    assert ours.loop.tier.name == "eager"
    assert_alike(ours, eager)


def test_kernels_of_one_channel_are_in_both_layouts():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 6, 1))
    assert layout.why_not(model.modules()) == ""
    assert "already" in layout.why_not(model.to(memory_format=torch.channels_last).modules())


def test_what_is_no_batch_of_pictures_stays_as_it_is():
    one, lazy = nn.Conv2d(3, 6, 3), nn.LazyConv2d(6, 3)
    assert layout.why_not([one, lazy]) == ""
    with layout.channels_last([one, lazy]):
        assert one(torch.randn(3, 8, 8)).is_contiguous()
        assert one(input=torch.randn(2, 3, 8, 8)).is_contiguous()
        assert lazy(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
    assert get_entry(one) is get_entry(lazy) is None


def test_what_an_interrupted_end_leaves_is_removed_by_the_next():
    one = nn.Conv2d(3, 6, 3)
    block = layout.channels_last([one])
    block.__enter__()  # and never ended
    with layout.channels_last([one]):
        pass
    assert get_entry(one) is None


def test_what_the_user_compiled_stays_compiled():
    one = nn.Conv2d(3, 6, 3)
    one.compile(backend="eager")
    before = get_entry(one)
    with layout.channels_last([one]):
        assert get_entry(one) is before
    assert get_entry(one) is before


def test_without_an_optimizer_it_is_the_same():
    loop = hotloop.Loop(build(), run="channels_last")
    assert loop.tier.name == "channels_last"
