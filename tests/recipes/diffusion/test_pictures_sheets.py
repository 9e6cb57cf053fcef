"""Sheets of samples."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from hotloop.recipes.diffusion.sampling import Sampler


def sampler(monkeypatch, images, prompts):
    monkeypatch.setattr(Sampler, "make", lambda self, each: images)
    return Sampler(networks=None, prediction="", prompts=prompts, size=(0, 0), steps=1, guidance=1, batch=1, seed=0)


def test_a_sheet_has_a_column_for_each_prompt(tmp_path, monkeypatch):
    images = torch.stack([torch.full((3, 96, 96), value) for value in (-1.0, 0.0, 1.0, 5.0, float("nan"), 0.5)])
    sampler(monkeypatch, images, ("a", "b")).sheet(tmp_path, 7, 3)
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "step-000007.png"
    with Image.open(path) as sheet:
        assert sheet.size == (2 * 96, 3 * 96)
        seen = [sheet.getpixel((column * 96 + 50, row * 96 + 50))[0] for row in range(3) for column in range(2)]
    assert seen == [0, 128, 255, 255, 0, 191]


def test_small_pictures_are_enlarged(tmp_path, monkeypatch):
    sampler(monkeypatch, torch.zeros(3, 3, 8, 10), ("a", "b", "c")).sheet(tmp_path, 1, 1)
    with Image.open(tmp_path / "samples" / "step-000001.png") as sheet:
        assert sheet.size == (3 * 90, 72)


def test_a_sheet_that_cannot_be_written_leaves_the_former_whole(tmp_path, monkeypatch):
    one, path = sampler(monkeypatch, torch.zeros(1, 3, 8, 8), ("a",)), tmp_path / "samples" / "step-000001.png"
    one.sheet(tmp_path, 1, 1)
    before = path.read_bytes()

    def full(self, file, **options):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space"):
        one.sheet(tmp_path, 1, 1)
    assert path.read_bytes() == before
