"""The digits and Fashion-MNIST: captions, pixels, and files that are torn or hostile."""

from __future__ import annotations

import gzip
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hotloop import recipes
from hotloop.errors import ConfigError, DataError
from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.pictures import embedded, fashion, loading
from hotloop.train import configure


def load(*overrides):
    return pictures.load(configure.load(["recipe=diffusion", "data.sample_size=null", *overrides]))


def idx(values, *shape, kind=8):
    return gzip.compress(struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, len(shape), *shape) + bytes(values))


def write_fashion(folder, images=None, labels=None):
    folder.mkdir(exist_ok=True)
    (folder / fashion.IMAGES).write_bytes(images or idx([0, 255, 128, 0] * 20, 20, 2, 2))
    (folder / fashion.LABELS).write_bytes(labels or idx([*range(10)] * 2, 20))
    return folder


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


def test_fashion_mnist_is_read_from_its_files(tmp_path):
    clothes = load("pictures=fashion-mnist", f"pictures.path={write_fashion(tmp_path / 'f')}", "pictures.size=8")
    assert (len(clothes), clothes.sizes, clothes.labels) == (20, ((8, 8),), [*range(10)] * 2)
    assert all(fashion.CLASSES[label] in text for label, text in zip(clothes.labels, clothes.captions, strict=True))
    assert clothes.pixels(torch.tensor([3])).shape == (1, 1, 8, 8)


def test_missing_files_are_told_with_the_command_that_installs_them(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"has no train-images.*and no train-labels.*apt install dataset-fashion-mnist"):
        load("pictures=fashion-mnist", f"pictures.path={tmp_path}")
    monkeypatch.setattr(fashion, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"fashion-mnist: .*nowhere has no"):
        load("pictures=fashion-mnist")


TORN = {
    "no gzip": (b"PK\3\4 something", "cannot be read"),
    "cut off": (idx([0] * 80, 20, 2, 2)[:-12], "cannot be read"),
    "of floats": (idx([0] * 80, 20, 2, 2, kind=13), "IDX file of bytes with 3 dimensions"),
    "of two dimensions": (idx([0] * 40, 20, 2), "IDX file of bytes with 3 dimensions"),
    "no header": (gzip.compress(b"\0\0"), "IDX file of bytes"),
    "too little": (idx([0] * 79, 20, 2, 2), "holds 79 values, where its header says 80"),
    "too much": (idx([0] * 81, 20, 2, 2), "holds more values"),
    "a claim of 4 EB": (idx([0], 2**32 - 1, 2**15, 2**15), "claims to hold"),
    "fewer pictures than labels": (idx([0] * 76, 19, 2, 2), "19 pictures and 20 labels"),
}


@pytest.mark.parametrize("what", TORN)
def test_a_torn_or_hostile_file_is_refused(tmp_path, what):
    content, message = TORN[what]
    with pytest.raises(DataError, match=message):
        fashion.load(str(write_fashion(tmp_path / "f", images=content)), 0)


def test_a_label_without_a_class_is_refused(tmp_path):
    with pytest.raises(DataError, match="label 10, expected 0 to 9"):
        fashion.load(str(write_fashion(tmp_path / "f", labels=idx([10] * 20, 20))), 0)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.binary(max_size=60), st.booleans())
def test_whatever_the_bytes_idx_is_read_or_refused(tmp_path_factory, data, packed):
    # The fuzzed bytes follow the head of a file that is right.
    path = tmp_path_factory.mktemp("idx") / "file.gz"
    path.write_bytes(gzip.compress(b"\0\0\10\1" + data) if packed else data)
    try:
        found = fashion.read_idx(path, 1)
    except DataError as error:
        found = str(error)
    assert str(path) in found if isinstance(found, str) else (found.dtype, found.ndim) == (torch.uint8, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pictures=folder"], r"pictures\.path is not set"),
        (["pictures.size=8", "pictures.step=16"], r"pictures\.size=8 is less than pictures\.step=16"),
        (["pictures.source=web"], "expected digits or fashion-mnist or folder"),
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
