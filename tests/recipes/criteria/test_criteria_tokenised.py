import pytest
import torch
from training_fixtures import tiny_encoder

from hotloop.errors import ConfigError
from hotloop.recipes.criteria import encoder, tokenised
from hotloop.recipes.criteria.pairs import Pair


@pytest.fixture(scope="module")
def tokenizer():
    return encoder.load(str(tiny_encoder())).tokenizer


PAIRS = [Pair("fever " * (1 + index % 4), "cough", index % 2, f"g{index}") for index in range(10)]


def test_auto_length_holds_nearly_all_pairs_and_is_a_multiple_of_eight(tokenizer):
    lengths = tokenised.choose_lengths(tokenizer, PAIRS, "auto", [], 32)
    assert lengths.buckets == (8,)
    assert "0 of 10" in lengths.note


def test_a_length_beyond_the_model_is_refused(tokenizer):
    with pytest.raises(ConfigError, match=r"model\.max_length=64: the model takes at most 32"):
        tokenised.choose_lengths(tokenizer, PAIRS, 64, [], 32)
    with pytest.raises(ConfigError, match=r"model\.buckets=48"):
        tokenised.choose_lengths(tokenizer, PAIRS, "auto", [16, 48], 32)


def test_what_is_cut_is_counted(tokenizer):
    lengths = tokenised.choose_lengths(tokenizer, PAIRS, 6, [], 32)
    assert "4 of 10 pairs are cut" in lengths.note
    assert tokenised.Dataset(tokenizer, PAIRS, lengths).inputs["input_ids"].shape == (10, 6)


def test_batches_take_the_smallest_bucket_that_holds_them(tokenizer):
    dataset = tokenised.Dataset(tokenizer, PAIRS, tokenised.choose_lengths(tokenizer, PAIRS, "auto", [6, 8], 32))
    assert dataset.take(torch.tensor([0, 1])).inputs["input_ids"].shape == (2, 6)
    assert dataset.take(torch.tensor([0, 3])).inputs["input_ids"].shape == (2, 8)
