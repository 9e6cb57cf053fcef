"""A bounded look at a run's batches, which the run cannot notice."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from hotloop.step.calls.preview import BATCHES, look


def seen(batches):
    found = []
    return look(batches, found.append), [
        args[0].shape[0] if isinstance(args[0], torch.Tensor) else args for args in found
    ]


def data(rows=70):
    return TensorDataset(torch.randn(rows, 3), torch.zeros(rows))


def test_a_loader_is_looked_at_with_its_last_batch():
    looked, sizes = seen(DataLoader(data(), batch_size=16, shuffle=True))
    assert (looked.read, looked.why_not) == (5, "")
    assert sorted(sizes) == [6, 16, 16, 16, 16]


def test_a_look_is_bounded():
    looked, sizes = seen(DataLoader(data(1000), batch_size=3))
    assert looked.read == BATCHES
    assert sizes.count(1) == 1


def test_a_slow_data_set_is_left_soon(monkeypatch):
    monkeypatch.setattr("hotloop.step.calls.preview.SECONDS", 0.0)
    assert seen(DataLoader(data(), batch_size=16))[0].read == 1


class Augmented(TensorDataset):
    """Draws from every stream there is."""

    def __getitem__(self, index):
        noise = random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002
        return super().__getitem__(index)[0] + noise


@pytest.mark.parametrize("own", [False, True])
def test_the_run_draws_what_it_would_have_drawn(own):
    def order(looks):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        generator = torch.Generator().manual_seed(5) if own else None
        loader = DataLoader(Augmented(torch.arange(12.0)), batch_size=5, shuffle=True, generator=generator)
        first = next(iter(loader))
        if looks:
            assert look(loader, lambda args: None).read == 3
        return torch.cat([first, *loader])

    assert torch.equal(order(looks=True), order(looks=False))


class Counting(BatchSampler):
    """A sampler of the user's own, which counts its epochs."""

    epochs = 0

    def __iter__(self):
        self.epochs += 1
        return super().__iter__()


def test_a_sampler_of_the_users_own_is_not_used_up():
    sampler = Counting(RandomSampler(data()), 16, drop_last=False)
    assert seen(DataLoader(data(), batch_sampler=sampler))[0].read == 5
    assert sampler.epochs == 0


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    ("batches", "why"),
    [
        (DataLoader(Stream(), batch_size=2), "a stream"),
        (DataLoader(data(), batch_size=None), "single samples"),
        (iter([torch.ones(2)]), "might use up a list_iterator"),
        ([], "no batch to read"),
    ],
)
def test_what_a_look_would_use_up_is_left_alone(batches, why):
    looked, sizes = seen(batches)
    assert sizes == []
    assert why in looked.why_not


def test_a_batch_that_cannot_be_read_is_a_reason():
    class Bad(TensorDataset):
        def __getitem__(self, index):
            raise OSError("gone")

    assert "OSError: gone" in seen(DataLoader(Bad(torch.ones(4)), batch_size=2))[0].why_not


def test_lists_and_functions():
    assert seen([(torch.ones(3),), (torch.ones(2),)])[1] == [2, 3]
    assert seen(lambda: (torch.ones(n) for n in (3, 2)))[1] == [3, 2]
    assert seen(lambda: DataLoader(data(), batch_size=64))[1] == [6, 64]
