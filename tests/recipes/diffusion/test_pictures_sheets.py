"""Sheets of samples, and what says whether a sample shows its digit."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.pictures import grid, recognise
from hotloop.train import configure


@pytest.fixture(scope="module")
def digits():
    return pictures.load(configure.load(["recipe=diffusion", "data.sample_size=600"]))


def test_a_sheet_has_each_picture_over_its_caption(tmp_path):
    images = torch.stack([torch.full((3, 96, 96), value) for value in (-1.0, 0.0, 1.0, 5.0, float("nan"))])
    grid.write_grid(tmp_path / "new" / "sheet.png", images, ["black", "grey " * 60, "", "x" * 5000, "bad\nline"], 2)
    with Image.open(tmp_path / "new" / "sheet.png") as sheet:
        across, down = sheet.width // 2, sheet.height // 3
        seen = [sheet.getpixel((column * across + 50, row * down + 50)) for row in range(3) for column in range(2)]
        caption = sheet.crop((0, 101, 100, down))
    assert seen == [(0, 0, 0), (128, 128, 128), (255, 255, 255), (255, 255, 255), (255, 0, 0), (255, 255, 255)]
    assert caption.getextrema()[0][0] < 100  # something is written there
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]


def test_small_grey_pictures_are_enlarged(tmp_path):
    grid.write_grid(tmp_path / "sheet.png", torch.zeros(3, 1, 8, 8), ["a", "b", "c"], 10)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == 3 * (96 + grid.GAP) + grid.GAP


def test_a_sheet_that_cannot_be_written_leaves_the_former_whole(tmp_path, monkeypatch):
    path = tmp_path / "sheet.png"
    grid.write_grid(path, torch.zeros(1, 1, 8, 8), ["a"], 1)
    before = path.read_bytes()

    def full(self, file, **options):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space"):
        grid.write_grid(path, torch.ones(1, 1, 8, 8), ["a"], 1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("shape", "captions", "message"),
    [((0, 1, 8, 8), 0, "expected"), ((2, 2, 8, 8), 2, "1 or 3"), ((2, 1, 8, 8), 1, "2 images, 1 captions")],
)
def test_what_is_no_sheet_is_refused(tmp_path, shape, captions, message):
    with pytest.raises(ValueError, match=message):
        grid.write_grid(tmp_path / "sheet.png", torch.zeros(shape), ["a"] * captions, 2)


def test_a_recogniser_reads_real_digits_and_not_noise(digits):
    found = recognise.train(digits, 0)
    assert found.held_out.total == 150
    assert found.held_out.value > 0.9
    assert recognise.train(digits, 0).held_out == found.held_out
    noise = torch.randn(200, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    share = found.judge(noise, [row % 10 for row in range(200)])
    assert share.interval[1] < 0.3
    with pytest.raises(ValueError, match="expected finite pictures of shape"):
        found.read(noise[:, :, :8])
    with pytest.raises(ValueError, match="expected finite pictures"):
        found.read(noise * torch.nan)


def test_wilsons_interval_is_that_of_the_literature():
    # R. G. Newcombe, Two-sided confidence intervals for the single proportion, Stat. Med. 17 (1998), table I, method 3.
    for right, total, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
                                    (1, 29, 0.0061, 0.1718)):  # fmt: skip
        assert recognise.Share(right, total).interval == pytest.approx((low, high), abs=6e-5)
    assert recognise.Share(20, 20).interval == pytest.approx((1 - 0.1611, 1.0), abs=6e-5)
    assert str(recognise.Share(15, 148)) == "15 of 148: 0.101 (95% interval 0.062 to 0.160)"


def test_a_recogniser_needs_labels_of_one_size(digits):
    import copy

    unlabelled = copy.copy(digits)
    unlabelled.labels = None
    with pytest.raises(ValueError, match="with labels, of one size"):
        recognise.train(unlabelled, 0)
