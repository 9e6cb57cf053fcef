"""What is said of a declined tier is true of the program, in its author's words, with a remedy that fits."""

from __future__ import annotations

import functools
import pathlib

import pytest
import torch
from step_programs import GRAPH
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop._torch import versions
from hotloop.errors import describe
from hotloop.testing import captured_step_emulation

STEPS = 14


def train(make, asked, layers=None):
    """Train with the step that ``make(model, optimizer)`` gives, and give what was declined and the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)) if layers is None else layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked) as loop:
        step = loop.step(make(model, optimizer))
        generator = torch.Generator().manual_seed(1)
        losses = [step(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(STEPS)]
        return {one.name: one for one in loop.status().tiers}[asked], torch.stack(losses)


def same_as_eager(make, asked, layers=None):
    tier, ours = train(make, asked, layers)
    torch.testing.assert_close(ours, train(make, "eager", layers)[1])
    return tier


def finish(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(model, optimizer):
    def step(x, y):
        return finish(F.cross_entropy(model(x), y), optimizer)

    return step


# -- steps that are no functions ---------------------------------------------------------------------------------------


class Step:
    """A step that is an object, as a trainer is."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.calls = model, optimizer, 0

    def __call__(self, x, y):
        self.calls += 1
        return finish(F.cross_entropy(self.model(x), y) / self.calls, self.optimizer)


def test_what_an_object_that_is_a_step_counts_is_named_as_its_author_does():
    why = same_as_eager(Step, GRAPH).why
    assert why.startswith("the step changes Python state: self.calls. ")


def weighted(model, optimizer, weights, x, y):
    weights[0] = weights[0] / 2
    return finish(F.cross_entropy(model(x), y) * weights[0], optimizer)


def test_what_is_bound_to_a_step_is_named():
    why = same_as_eager(lambda model, optimizer: functools.partial(weighted, model, optimizer, [1.0]), GRAPH).why
    assert why.startswith("the step changes Python state: what is bound to the step.arguments. ")


# -- hints -------------------------------------------------------------------------------------------------------------


def test_the_advice_for_weight_norm_is_given_where_it_is_in_use():
    def averaged(model, optimizer):
        model.average = torch.zeros(())

        def step(x, y):
            loss = finish(F.cross_entropy(model(x), y), optimizer)
            model.average = 0.5 * model.average + loss.detach()
            return loss

        return step

    def normed(model, optimizer):
        nn.utils.spectral_norm(model[0])
        return plain(model, optimizer)

    assert "weight_norm" not in same_as_eager(averaged, GRAPH).why
    assert "weight_norm" in same_as_eager(normed, GRAPH).why


def test_a_message_of_torch_ends_without_a_full_stop_of_its_own():
    """It was followed by another."""
    assert describe(ValueError("It is so. It stays so.")) == "ValueError: It is so. It stays so"
    assert describe(ValueError("and so on ...")) == "ValueError: and so on ..."


# -- nothing was compiled ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x)[0])


def under_a_transform(model, optimizer):
    def step(x, y):
        logits = torch.func.vmap(model, randomness="different")(x)
        return finish(F.cross_entropy(logits, y), optimizer)

    return step


def by_its_parts(model, optimizer):
    def step(x, y):
        return finish(F.cross_entropy(model[2](model[0](x).relu()), y), optimizer)

    return step


def in_a_list():
    return nn.ModuleList([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)])


def test_a_recurrent_model_that_torch_compiles_nothing_of_is_told_torchs_own_remedy():
    """Up to torch 2.14 dynamo gives the whole frame up. From 2.15 on it breaks at the call, and compiles the rest."""
    line = Recurrent.forward.__code__.co_firstlineno + 1
    with hotloop.watch() as events:
        tier = same_as_eager(plain, "aot_eager", Recurrent)
    if versions.check() < (2, 15):
        assert tier.why.startswith("nothing of the model was compiled: ")
        assert f" at {pathlib.Path(__file__)}:{line}: " in tier.why
        assert "torch._dynamo.config.allow_rnn=True" in tier.why
        assert "give the loop" not in tier.why
    else:
        assert (tier.state, tier.why) == ("in force", "")
        breaks = [event for event in events if isinstance(event, ev.GraphBreak)]
        assert {(event.file, event.line) for event in breaks} == {(str(pathlib.Path(__file__)), line)}
        assert all("torch._dynamo.config.allow_rnn=True" in event.reason for event in breaks)


def test_a_model_under_a_transform_is_told_what_to_compile():
    why = same_as_eager(under_a_transform, "aot_eager").why
    assert "a call under a transform of torch.func" in why
    assert "compile the function that applies the transform" in why
    assert "give the loop" not in why


@pytest.mark.filterwarnings("ignore")
def test_a_container_whose_parts_are_called_is_told_to_be_given_in_parts():
    why = same_as_eager(by_its_parts, "aot_eager", in_a_list).why
    assert "its compiled call was never entered" in why
    assert "give the loop the modules that are called, not one around them: Loop([encoder, head], optimizer)" in why


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_is_compiled_whole_is_told_that_nothing_of_its_model_was_compiled():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run="aot_eager")

    @torch.compile(backend="eager")
    def whole(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = loop.step(whole)
    for _ in range(6):
        step(torch.ones(2, 4))
    why = next(tier.why for tier in loop.status().tiers if tier.name == "aot_eager")
    assert why.startswith("nothing of the model was compiled: ")


def test_a_machine_without_a_compiler_is_told_what_it_lacks(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    why = same_as_eager(plain, "default").why
    assert "no C++ compiler: CXX is '/nowhere/g++'" in why
    assert "install what is missing" in why
    assert "give the loop" not in why


@pytest.mark.filterwarnings("ignore")
def test_a_value_that_a_library_reads_is_told_with_its_switch_where_code_is_compiled():
    """torch compares the mask with a causal one, on the host: no line of the program's can be moved out of the model."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    with hotloop.watch() as events:
        hotloop.compile(encoder, "aot_eager")(
            torch.randn(2, 3, 4), mask=nn.Transformer.generate_square_subsequent_mask(3)
        )
    (broken,) = [one for one in events if isinstance(one, ev.GraphBreak)]
    assert broken.file.endswith("transformer.py")
    assert "say what it is, by is_causal= of nn.TransformerEncoder" in broken.hint


# -- sizes, and inference mode -----------------------------------------------------------------------------------------


def by_a_mask(model, optimizer):
    def step(x, y):
        logits, kept = model(x), x[:, 0] > 0
        return finish(F.cross_entropy(logits[kept], y[kept]), optimizer)

    return step


def test_a_selection_by_a_mask_is_told_what_keeps_the_size():
    why = same_as_eager(by_a_mask, GRAPH).why
    assert "the size of a result depends on the data: index" in why
    assert "keep the size: torch.where(mask, x, 0), or x times the mask" in why
    assert "move it out of the step" not in why


def taught(model, optimizer):
    teacher = nn.Linear(4, 3)

    def step(x, _):
        with torch.inference_mode():
            wanted = teacher(x).softmax(-1)
        return finish(F.cross_entropy(model(x), wanted * 1.0), optimizer)

    return step


def test_a_teacher_in_inference_mode_is_captured():
    """The stand-in wrote what was made in inference mode outside of it, which torch forbids."""
    assert same_as_eager(taught, GRAPH).state == "in force"


# -- what torch's own optimizers keep ----------------------------------------------------------------------------------


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.factor = nn.Linear(4, 3), 1.0

    def forward(self, x):
        return self.layer(x) * self.__dict__["factor"]


def test_flags_of_an_optimizer_that_a_recording_sets_are_no_change_of_the_programs():
    """Code that looks at all attributes of something may read any: an unfused optimizer is recorded as a fused one."""
    tier = same_as_eager(plain, GRAPH, Weighted)
    assert (tier.state, tier.why) == ("in force", "")
