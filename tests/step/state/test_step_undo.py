"""What steps that run twice leave alone: all that they do not change, and tensors whose elements share memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from step_programs import GRAPH, batches
from torch import nn
from torch.nn import functional as F

from hotloop._torch.places import overlaps, places_of, put_back, viewed_like

TIERS = (GRAPH, "aot_eager")


def trained(*, buffer=None, read=lambda buffer, x: x, before=lambda model, step: None, steps=20, **settings):
    """A program that trains a classifier, with a buffer that is made and read so."""

    def program(run):
        model = nn.Linear(8, 4).to(run.device)
        if buffer is not None:
            model.register_buffer("kept", buffer(run.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer, **settings).step
        def train_step(x, y):
            loss = F.cross_entropy(model(read(getattr(model, "kept", None), x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, steps)):
            before(model, number)
            run.note(train_step(x, y))
        return list(model.parameters()), [
            one.resolve_conj().resolve_neg().clone()
            for one in model.buffers()
            if not one.is_meta and one.layout == torch.strided
        ]

    return program


@pytest.mark.parametrize("asked", TIERS)
@pytest.mark.parametrize("kind", ["expanded", "windows"])
def test_a_buffer_whose_elements_share_memory_is_put_back(both, kind, asked):
    """Written through a slice, it was trained twice in each proof."""

    def made(device):
        return (
            torch.ones(1, device=device).expand(8)
            if kind == "expanded"
            else torch.ones(9, device=device).unfold(0, 2, 1).t()
        )

    def counted(kept, x):
        (kept[:1] if kind == "expanded" else kept[:1, :4]).add_(1)
        return x * (kept if kind == "expanded" else kept[0])

    run = both.alike(trained(buffer=made, read=counted), asked=asked)
    assert run.status().undone == 0


@pytest.mark.parametrize("asked", TIERS)
def test_a_graph_outside_of_the_step_through_weights_that_nobody_writes_stays_good(both, asked):
    """Proofs and sentinel steps put the weights back that they had not changed, and autograd took them for others."""

    def program(run):
        model, frozen = (
            nn.Linear(8, 4).to(run.device),
            nn.Linear(4, 4).requires_grad_(requires_grad=False).to(run.device),
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
        reached = nn.Parameter(torch.ones(2, 4, device=run.device))

        @run.loop([model, frozen], optimizer, sentinel=1.0, total_steps=100_000).step
        def train_step(x, y):
            loss = F.cross_entropy(frozen(model(x)), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        versions = []
        for x, y in batches(run.device, 130):
            outside = frozen(reached).square().sum()
            run.note(train_step(x, y))
            outside.backward()
            versions.append(frozen.weight._version)
        assert len(set(versions)) == 1
        return model, reached.grad

    run = both.alike(program, asked=asked)
    assert run.status().tier == asked
    assert run.status().sentinels[0].checks


SEEN = {
    "plain": lambda: torch.arange(6.0),
    "strided": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "expanded": lambda: torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "expanded twice": lambda: torch.tensor(2.0).expand(3, 4),
    "windows": lambda: torch.arange(7.0).unfold(0, 3, 1),
    "windows, expanded": lambda: torch.arange(7.0).unfold(0, 3, 1).expand(2, 5, 3),
    "empty": lambda: torch.empty(0, 3),
    "nan": lambda: torch.tensor([float("nan"), -0.0]),
    "wide": lambda: torch.zeros(3, dtype=torch.complex128).conj(),
    "truths": lambda: torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", SEEN)
def test_each_place_goes_back_to_its_bits_and_no_write_counts(name):
    tensor = SEEN[name]()
    places = places_of(tensor)
    assert not overlaps(places)
    copy = places.clone()
    assert torch.equal(viewed_like(copy, tensor), tensor) or name == "nan"
    was, version = tensor.clone(), tensor._version
    with mock.patch("hotloop._torch.places.copy_all") as copied:
        put_back([places], [copy])
    assert not copied.call_args.args[0]
    places.copy_(~places if tensor.dtype == torch.bool else places.nan_to_num(1) + 1)
    changed = tensor._version
    put_back([places], [copy])
    assert torch.equal(
        tensor.view(torch.int32) if name == "nan" else tensor, was.view(torch.int32) if name == "nan" else was
    )
    assert tensor._version == changed == version + 1
