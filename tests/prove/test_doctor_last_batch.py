import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hotloop.prove.doctor.examining import last_batch

DATA = TensorDataset(torch.arange(23.0)[:, None], torch.arange(23))


class Endless(IterableDataset):
    def __iter__(self):
        yield from range(10)


def test_a_loaders_last_batch_has_its_size_and_its_collation():
    batch = last_batch(DataLoader(DATA, batch_size=4, shuffle=True), within=3)
    assert [tuple(one.shape) for one in batch] == [(3, 1), (3,)]


@pytest.mark.parametrize(
    "batches",
    [
        DataLoader(DATA, batch_size=4, drop_last=True),
        DataLoader(DATA, batch_size=23),
        DataLoader(DATA, batch_size=None),
        DataLoader(Endless(), batch_size=3),
        [1, 2, 3],
        iter([1] * 10),
        lambda: [1] * 10,
    ],
)
def test_where_there_is_none_or_nothing_tells(batches):
    assert last_batch(batches, within=3) is None


def test_an_epoch_that_is_seen_whole_needs_none():
    assert last_batch(DataLoader(DATA, batch_size=4), within=6) is None
    assert last_batch([1] * 9 + [2], within=9) == 2
