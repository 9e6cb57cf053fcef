"""A loop whose tier lays convolutions' weights out channels last: strides change, names, values and checkpoints do not."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError
from hotloop.step.layout import Layout
from hotloop.testing import captured_step_emulation

GIVEN, LAID_OUT = (27, 9, 3, 1), (27, 1, 9, 3)
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

    def strides(self):
        state = self.optimizer.state[self.model[0].weight].values()
        return [self.model[0].weight.stride(), *(one.stride() for one in state if one.dim() > 1)]


@contextlib.contextmanager
def stand_in(run):
    with captured_step_emulation() if run.endswith("+graph") else contextlib.nullcontext():
        yield


def assert_alike(ours, theirs):
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-4)
    assert list(ours.model.state_dict()) == list(theirs.model.state_dict())
    for mine, other in zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("run", WAYS)
def test_it_trains_as_eager_does_and_close_puts_the_strides_back(run, optimizer):
    eager = Run("eager", optimizer=optimizer).train(30)
    with stand_in(run):
        ours = Run(run, optimizer=optimizer)
        first = ours.model[0].weight
        ours.train(30)
        assert ours.loop.tier.name == run
        assert ours.loop.last_ran() == (run, "run")
        assert set(ours.strides()) == {LAID_OUT}
        ours.loop.close()
    assert set(ours.strides()) == {GIVEN}
    assert ours.model[0].weight is first
    assert_alike(ours, eager)


@pytest.mark.parametrize("run", WAYS)
def test_gradients_that_are_accumulated_follow_their_weights(run):
    eager = Run("eager", every=3).train(36)
    with stand_in(run):
        ours = Run(run, every=3).train(35)
        assert ours.model[0].weight.grad.stride() == LAID_OUT
        ours.loop.close()
        assert ours.model[0].weight.grad.stride() == GIVEN
    eager_before = Run("eager", every=3).train(35)
    torch.testing.assert_close(ours.model[0].weight.grad, eager_before.model[0].weight.grad, rtol=1e-4, atol=1e-5)
    assert ours.losses == pytest.approx(eager.losses[:35], rel=1e-4)


@pytest.mark.parametrize("run", WAYS)
def test_volumes_are_laid_out_too(run):
    model = build(nn.Conv3d, nn.AdaptiveAvgPool3d)
    eager = Run("eager", copy.deepcopy(model), shape=(2, 3, 6, 6, 6)).train(20)
    with stand_in(run):
        ours = Run(run, model, shape=(2, 3, 6, 6, 6)).train(20)
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last_3d)
        assert not model[0].weight.is_contiguous()
    assert_alike(ours, eager)


@pytest.mark.parametrize("run", WAYS)
def test_a_checkpoint_written_in_it_goes_on_in_plain_torch_and_back(run):
    whole = Run("eager").train(40)
    with stand_in(run):
        ours = Run(run).train(20)
        file = io.BytesIO()
        torch.save({"model": ours.model.state_dict(), "optimizer": ours.optimizer.state_dict()}, file)
        assert set(ours.strides()) == {LAID_OUT}
    file.seek(0)
    saved = torch.load(file)
    # torch's fused optimizers do not check strides on a CPU: state of other strides than the weight's trains wrongly.
    assert {one.stride() for one in saved["optimizer"]["state"][0].values() if one.dim() > 1} == {GIVEN}

    plain = Run("eager")
    plain.model.load_state_dict(saved["model"])
    plain.optimizer.load_state_dict(saved["optimizer"])
    plain._data, plain.losses = ours._data, list(ours.losses)
    state = ours._data.get_state()
    assert_alike(plain.train(20), whole)

    with stand_in(run):
        back = Run(run)
        back._data = torch.Generator().manual_seed(5)
        back.train(12)  # in the layout by now: what is loaded has other strides
        file.seek(0)
        saved = torch.load(file)  # anew: an optimizer takes what it loads as its own
        back.model.load_state_dict(saved["model"])
        back.optimizer.load_state_dict(saved["optimizer"])
        assert set(back.strides()) == {LAID_OUT}
        back._data.set_state(state)
        back.losses = list(ours.losses)
        assert_alike(back.train(20), whole)


def test_a_copy_of_the_weights_is_the_weights():
    ours, eager = Run("channels_last"), Run("eager")
    averages = []
    for run in (ours, eager):
        decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        average = torch.optim.swa_utils.AveragedModel(run.model, multi_avg_fn=decay)
        for _ in range(12):
            run.train(1)
            average.update_parameters(run.model)
        averages.append(average)
    for mine, other in zip(averages[0].state_dict().values(), averages[1].state_dict().values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-4, atol=2e-5)


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


def in_one_memory():
    model = build()
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return model


def of_a_subclass():
    class Own(nn.Parameter):
        pass

    model = build()
    model[0].weight = Own(model[0].weight.data)
    return model


def with_two_owners():
    model = build()
    model.register_buffer("mirror", model[0].weight.data, persistent=False)
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (in_one_memory, "0.weight is a part of a larger memory"),
        (of_a_subclass, "0.weight is a Own of 4 dimensions, with memory of its own kind"),
        (with_two_owners, "0.weight shares its memory with another parameter or buffer"),
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


def test_a_step_that_needs_the_strides_is_declined_and_they_come_back():
    class Viewed(nn.Module):
        def forward(self, x):
            return x.view(len(x), -1)

    ours = Run("channels_last", nn.Sequential(*build()[:3], Viewed(), nn.Linear(96, 4)))
    ours.train(6)
    assert ours.loop.tier.name == "eager"
    assert set(ours.strides()) == {GIVEN}
    why = next(tier.why for tier in ours.loop.status().tiers if tier.name == "channels_last")
    assert "view size is not compatible" in why


def test_an_unknown_layout_is_refused_with_the_names_that_there_are():
    with pytest.raises(ConfigError, match=r"run 'channels_first'.*channels_last"):
        Run("channels_first")
    with pytest.raises(ConfigError, match=r"run 'channels_last\+graph': whole steps can be captured on a GPU only"):
        Run("channels_last+graph")


def test_state_that_is_quantised_is_left_as_it_is():
    ours = Run("eager").train(2)
    for entry in ours.optimizer.state.values():
        entry["quantised"] = torch.zeros(1, dtype=torch.uint8)
    ours.optimizer.state[ours.model[0].weight]["quantised"] = torch.zeros(6, 3, 3, 3, dtype=torch.uint8)
    layout = Layout([ours.model], [ours.optimizer])
    assert "keeps state of a weight in torch.uint8" in layout.why_not()
    with pytest.raises(RuntimeError, match=r"torch\.uint8"):
        layout.switch(True)
    assert ours.model[0].weight.stride() == GIVEN


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
    assert set(ours.strides()) == {GIVEN}
    assert_alike(ours, eager)


def test_weights_of_one_name_in_two_models_are_both_laid_out():
    first, second = (
        build()[:2],
        nn.Sequential(nn.Conv2d(6, 6, 3, bias=False), *build()[5:6], nn.Flatten(), nn.Linear(6, 4)),
    )
    layout = Layout([first, second])
    layout.switch(True)
    assert [model[0].weight.stride() for model in (first, second)] == [(27, 1, 9, 3), (54, 1, 18, 6)]
    layout.close()
    assert [model[0].weight.stride() for model in (first, second)] == [(27, 9, 3, 1), (54, 9, 3, 1)]


def test_kernels_of_one_channel_are_in_both_layouts():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 6, 1))
    assert Layout([model]).why_not() == ""
    assert "already" in Layout([model.to(memory_format=torch.channels_last)]).why_not()


def test_what_the_layout_in_force_needs_no_more_is_freed():
    ours = Run("channels_last").train(8)
    places = ours.loop.context.compiled.layout._places.values()
    assert places
    assert not [place for place in places if place.memory[False] is not None]


def test_without_the_optimizer_the_layout_is_refused(caplog):
    """A fused optimizer computes wrongly, on a CPU without a word, where its state has other strides than the weight."""
    model = build()
    loop = hotloop.Loop(model, run="channels_last")
    assert loop.tier.name == "eager"
    assert "give the loop the optimizer" in caplog.text
