"""Shapes at work in a loop: what a look at the batches decides before a compile is spent."""

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import hotloop
from hotloop import events as ev
from hotloop.errors import ConfigError


def ragged(rows=70, size=16):
    x = torch.randn(rows, 8)
    return DataLoader(torch.utils.data.TensorDataset(x, torch.arange(rows) % 4), batch_size=size)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 4)

    def forward(self, ids):
        return self.head(self.embed(ids).sum(1))


def sentences(lengths, rows=4):
    return [(torch.randint(1, 50, (rows, length)), torch.arange(rows) % 4) for length in lengths]


def loop_over(model, data, *, run="aot_eager", epochs=1, given=True, **settings):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run=run, batches=data if given else None, **settings)

    @loop.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with hotloop.watch() as events:
        for _ in range(epochs):
            for batch in data:
                train_step(*batch)
    loop.settle()
    return loop, [event for event in events if isinstance(event, ev.Compiled) and event.component is not None]


def said(loop):
    return [line for line in loop.status().decisions if line.startswith(("shapes", "buckets"))]


def test_a_short_last_batch_runs_eager_and_compiles_nothing():
    torch.manual_seed(0)
    loop, compiled = loop_over(Classifier(), ragged(rows=16 * 30 + 6), epochs=2)
    assert "1 of 31 batches looked at are not of the usual size 16" in said(loop)[0]
    assert len(compiled) == 1
    assert {one.name: one.steps for one in loop.status().tiers}["eager"] >= 2


def test_batches_of_one_shape_are_said_to_be():
    loop, compiled = loop_over(Classifier(), ragged(rows=64))
    assert said(loop) == ["shapes: all 4 batches looked at have one shape"]
    assert len(compiled) == 1


def test_lengths_are_dynamic_from_the_first_compile_on():
    data = sentences(range(10, 40))
    loop, compiled = loop_over(Words(), data)
    assert "30 lengths in 30 batches" in said(loop)[0]
    assert len(compiled) == 1
    assert loop.status().tier == "aot_eager"


def test_without_a_look_the_second_length_is_one_more_compile():
    _, compiled = loop_over(Words(), sentences(range(10, 70)), given=False)
    assert len(compiled) == 2


def test_two_frequent_lengths_have_code_of_their_own():
    loop, compiled = loop_over(Words(), sentences([16, 24] * 10))
    assert "2 lengths make up 100% of 20 batches looked at: code for each" in said(loop)[0]
    assert len(compiled) == 2
    (status,) = loop.context.compiled.status().components.values()
    assert status.recompiles == 1  # the second is static as well, not dynamic: no third for what comes again


def test_lengths_that_would_pay_in_buckets_are_said(caplog):
    caplog.set_level("INFO", logger="hotloop")
    loop_over(Words(), sentences(range(10, 40)))
    assert "buckets={'x': hotloop.Pad(dim=1, value=..., to=(16, 24, 32, 40))}" in caplog.text
    assert "times as fast" in caplog.text


def test_buckets_without_sizes_are_chosen_from_the_batches():
    data = sentences([10, 12, 30, 31] * 5)
    loop, compiled = loop_over(Words(), data, buckets={"x": hotloop.Pad(dim=1, value=0)})
    assert said(loop)[0].startswith("buckets['x']: padded to (16, 32)")
    assert "2 lengths make up 100%" in said(loop)[1]
    assert len(compiled) == 2


def test_chosen_buckets_train_as_unpadded_batches_do():
    def trained(**settings):
        torch.manual_seed(0)
        model = Words()
        loop_over(model, sentences([10, 12, 30, 31] * 3), run="eager", **settings)
        return model

    torch.manual_seed(0)
    plain, padded = trained(), trained(buckets={"x": hotloop.Pad(dim=1, value=0)})
    for ours, theirs in zip(plain.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_buckets_without_sizes_need_batches():
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"buckets\['x'\] has no sizes: give to=\(64, 128\), or batches=loader"):
        hotloop.Loop(model, optimizer, buckets={"x": hotloop.Pad(dim=1, value=0)})
    loop = hotloop.Loop(model, optimizer, buckets={"x": hotloop.Pad(dim=1, value=0)}, batches=iter([]))
    with pytest.raises(ConfigError, match="might use up"):
        loop.step(lambda x: x)


def test_a_step_that_takes_something_else_is_left_to_what_it_gets(caplog):
    caplog.set_level("INFO", logger="hotloop")
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run="aot_eager", batches=[{"x": torch.ones(2, 3, 4)}])

    @loop.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in batches("cpu", 8):
        train_step(x, y)
    assert "is not called with the batches that were looked at" in caplog.text
    assert loop.status().tier == "aot_eager"


def test_a_look_that_fails_costs_nothing():
    loop, compiled = loop_over(Classifier(), [*ragged(rows=64)], given=False)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = hotloop.Loop(model, optimizer, run="aot_eager", batches=iter([1]))
    other.step(lambda x: x)
    assert not said(other)
    assert loop.status().tier == "aot_eager"
    assert len(compiled) == 1


@pytest.mark.parametrize("run", ["eager", "aot_eager"])
def test_training_is_as_without_a_look(run):
    def trained(given):
        torch.manual_seed(0)
        model = Classifier()
        data = DataLoader(ragged().dataset, batch_size=16, shuffle=True)
        loop_over(model, data, run=run, given=given, epochs=2)
        return model

    for ours, theirs in zip(trained(True).parameters(), trained(False).parameters(), strict=True):
        assert torch.equal(ours, theirs)
