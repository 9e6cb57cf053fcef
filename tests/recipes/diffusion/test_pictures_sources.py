"""The digits: captions, pixels, and how they are split."""

from __future__ import annotations

import pytest
import torch

from hotloop import recipes
from hotloop.errors import ConfigError
from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.pictures import embedded, loading
from hotloop.train import configure


def load(*overrides):
    return pictures.load(configure.load(["recipe=diffusion", "data.sample_size=null", *overrides]))


def test_the_digits_have_captions_with_their_word_and_pixels_at_the_size_that_was_asked_for():
    digits = load()
    assert (len(digits), digits.sizes, digits.channels) == (1797, ((16, 16),), 1)
    assert all(
        embedded.DIGITS[label] in text.split() for label, text in zip(digits.labels, digits.captions, strict=True)
    )
    assert len(set(digits.captions)) == len(embedded.DIGITS) * len(embedded.DIGIT_WORDINGS)
    assert digits.prompts[3] == "a handwritten three"
    pixels = digits.pixels(torch.arange(50))
    assert (pixels.shape, pixels.dtype) == ((50, 1, 16, 16), torch.float32)
    assert (float(pixels.min()), float(pixels.max())) == (-1, 1)
    small = load("pictures.size=8").pixels(torch.arange(50))
    shrunk = torch.nn.functional.avg_pool2d(pixels, 2)
    assert float((small - shrunk).abs().mean()) < 0.15  # the same pictures, upsampled
    assert digits.describe() == "1797 pictures (grey); width x height: 16 x 16: 1797"


def test_a_seed_chooses_the_wordings_and_the_fingerprint_follows_what_matters():
    same, other, larger, fewer = load(), load("run.seed=1"), load("pictures.size=32"), load("data.sample_size=100")
    assert same.captions == load().captions != other.captions
    prints = [one.fingerprint() for one in (same, other, larger, fewer)]
    assert len(set(prints)) == 4
    assert prints[0] == load("training.batch_size=8").fingerprint()  # one size holds any batch
    assert len(fewer) == 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pictures=folder"], r"pictures\.path is not set"),
        (["pictures.size=8", "pictures.step=16"], r"pictures\.size=8: expected a multiple of pictures\.step=16"),
        (["pictures.source=web"], "Input should be 'digits' or 'folder'"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        configure.load(["recipe=diffusion", *overrides])


def test_a_bucket_needs_a_batch_on_the_training_side():
    assert (
        loading.needed(configure.load(["recipe=diffusion", "training.batch_size=8", "data.validation_fraction=0.2"]))
        == 10
    )
    assert loading.needed(configure.load(["recipe=diffusion", "training.batch_size=8", "kfold.n_splits=2"])) == 16
    together = ["training.batch_size=4", "training.gradient_accumulation=2", "kfold.n_splits=2"]
    assert loading.needed(configure.load(["recipe=diffusion", *together])) == 16


def test_folds_hold_out_each_picture_once():
    settings = configure.load(["recipe=diffusion", "data.sample_size=160", "kfold.n_splits=4", "kfold.fold=1"])
    sides = recipes.load("diffusion").sides(settings)
    assert len(sides.validation.groups) == 40
    assert not set(sides.train.groups) & set(sides.validation.groups)
    sides.check("fold 1", "")
