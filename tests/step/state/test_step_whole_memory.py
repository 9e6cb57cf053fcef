"""A step that writes a part of a tensor's memory, and another part later: a proof puts back all of that memory."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH
from step_sentinels import checked_every
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

WIDE, LONG = 4, 16


def of_closure(model):
    return torch.randn(8, LONG), ()


def of_module(model):
    model.queue = torch.randn(8, LONG)
    return model.queue, ()


def of_a_view(model):
    return torch.randn(LONG + 2, 20)[1:-1, 2:18:2].t(), ()


def of_windows(model):
    return torch.randn(8 * LONG + 2).as_strided((8 * LONG, 3), (1, 1)).select(1, 1).view(8, LONG), ()


def known_in_part(model):
    queue = torch.randn(8, LONG)
    return queue, [{"head": queue[:, :WIDE]}]


def beside_a_buffer(model):
    queue = torch.randn(8 + 8, LONG)
    model.register_buffer("head", queue[:8])
    return queue[8:], ()


def beside_a_parameter(model):
    both = torch.randn(8 + LONG, 8)
    model.weight.data = both[:8]
    return both[8:].t(), ()


class Tensors(TwoTensor):
    """Two tensors in one, whose operations run on each."""


def of_two(model):
    return Tensors(torch.randn(8, LONG), torch.randn(8, LONG)), ()


QUEUES = (of_closure, of_module, of_a_view, of_windows, beside_a_buffer, beside_a_parameter, of_two)


def by_slice(queue, at, keys):
    queue[:, at : at + WIDE].copy_(keys)


def through_data(queue, at, keys):
    queue[:, at : at + WIDE].data.copy_(keys)


def by_index(queue, at, keys):
    queue[:, at : at + WIDE][:, torch.arange(WIDE)] = keys


def by_mask(queue, at, keys):
    queue[:, at : at + WIDE].masked_fill_(keys > 0, 0.5)


def through_windows(queue, at, keys):
    queue.unfold(1, WIDE, WIDE)[:, at // WIDE].copy_(keys)


def as_bits(queue, at, keys):
    queue.view(torch.int32)[:, at : at + WIDE] = keys.contiguous().view(torch.int32)


WRITES = (by_slice, through_data, by_index, by_mask, through_windows, as_bits)


def queueing(make, write, *, every, **settings):
    """A program whose step writes a moving slice: at every step by a tensor on the host, or by a number that moves."""

    def program(run):
        model = nn.Linear(8, 8)
        queue, state = make(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
        place, at = [0], torch.zeros(1, dtype=torch.long)

        @run.loop(model, optimizer, state=state, **settings).step
        def train_step(x):
            keys = model(x)
            loss = F.cross_entropy(keys @ getattr(queue, "a", queue), torch.zeros(WIDE, dtype=torch.long))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            write(queue, int(at) if every == 1 else place[0], keys.detach().t())
            if every == 1:
                at.add_(WIDE).remainder_(LONG)
            return loss.detach()

        draws = torch.Generator().manual_seed(1)
        for number in range(16 if every == 1 else 3 * every):
            place[0] = number // every * WIDE
            run.note(train_step(torch.randn(WIDE, 8, generator=draws)))
        return model, optimizer, getattr(queue, "a", queue)

    return program


@pytest.mark.parametrize("make", QUEUES, ids=lambda one: one.__name__)
def test_compiled_code_leaves_a_queue_as_eager_does(both, make):
    run = both.alike(queueing(make, by_slice, every=1), asked="aot_eager")
    in_parts = make is of_two  # whose parts are not put back: declined by name
    assert ["pass it to the loop" in one.hint for one in run.declined] == [True] * in_parts
    assert run.status().tier == ("eager" if in_parts else "aot_eager")


def test_the_sentinel_leaves_a_queue_as_eager_does(both):
    with checked_every(2):
        run = both.alike(queueing(of_closure, by_slice, every=1, sentinel=0.5), asked="aot_eager")
    assert run.status().sentinels[0].checks >= 2
    assert run.status().tier == "aot_eager"


@pytest.mark.campaign
@pytest.mark.parametrize("write", WRITES, ids=lambda one: one.__name__)
def test_however_it_is_written(both, write):
    run = both.alike(queueing(of_closure, write, every=1), asked="aot_eager")
    assert run.status().tier == "aot_eager"


@pytest.mark.parametrize("make", [of_closure, known_in_part, beside_a_buffer], ids=lambda one: one.__name__)
def test_a_recording_of_each_place_leaves_a_queue_as_eager_does(both, make):
    run = both.alike(queueing(make, by_slice, every=12))
    assert not run.declined
    assert run.status().tier == GRAPH
