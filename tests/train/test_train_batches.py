import pytest
import torch
from training_fixtures import tiny_encoder

from hotloop.errors import DataError
from hotloop.recipes.criteria import encoder, tokenised
from hotloop.recipes.criteria.pairs import Pair
from hotloop.train import batches


@pytest.fixture(scope="module")
def tokenizer():
    return encoder.load(str(tiny_encoder())).tokenizer


PAIRS = [Pair("fever " * (1 + index % 4), "cough", index % 2, f"g{index}") for index in range(10)]


@pytest.fixture
def dataset(tokenizer):
    return lambda *buckets: tokenised.Dataset(
        tokenizer, PAIRS, tokenised.choose_lengths(tokenizer, PAIRS, "auto", buckets, 32)
    )


def test_an_epoch_has_batches_of_one_size_in_an_order_of_its_own(dataset):
    first, again, second = (batches.epoch_order(dataset(), 4, 0, epoch) for epoch in (0, 0, 1))
    assert [len(rows) for rows in first] == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], second[0])
    assert [len(rows) for rows in batches.epoch_order(dataset(), 16, 0, 0)] == [10]


def test_validation_sees_every_row_once_in_batches_of_one_size(tokenizer):
    dataset = tokenised.Dataset(tokenizer, PAIRS, tokenised.choose_lengths(tokenizer, PAIRS, 8, [], 32))
    seen = [(batch.labels, count) for batch, count in batches.in_order(dataset, 4)]
    assert {len(labels) for labels, _ in seen} == {4}
    assert torch.equal(torch.cat([labels[:count] for labels, count in seen]), dataset.labels)


class Apart(batches.Table):
    """Rows of several shapes that cannot be padded to one another."""

    apart = True

    def __init__(self, *counts):
        super().__init__({"row": torch.arange(sum(counts))}, torch.arange(sum(counts)))
        self.bucket = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        self.buckets = len(counts)

    def take(self, rows):
        assert len(set(self.bucket[rows].tolist())) == 1, "rows of two shapes in a batch"
        return super().take(rows)


def test_shapes_that_stay_apart_never_make_a_batch_together():
    data = Apart(5, 3, 9)
    for epoch in range(3):
        order = batches.epoch_order(data, 4, 0, epoch)
        assert len(order) == batches.per_epoch(data, 4) == 3
        assert sorted(int(data.bucket[data.take(rows).labels[0]]) for rows in order) == [0, 2, 2]
    seen = [(batch.labels, count) for batch, count in batches.in_order(data, 4)]
    assert {len(labels) for labels, _ in seen} == {4}
    assert torch.cat([labels[:count] for labels, count in seen]).tolist() == list(range(17))


def test_no_shape_with_a_whole_batch_is_told_before_training():
    with pytest.raises(DataError, match=r"training\.batch_size=8: none of the 2 shapes"):
        batches.per_epoch(Apart(5, 4), 8)
    assert batches.per_epoch(Apart(5), 8) == len(batches.epoch_order(Apart(5), 8, 0, 0)) == 1
