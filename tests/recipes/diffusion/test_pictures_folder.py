"""A folder of one's own: what is taken, what is named with its reason, and what encoders give of it once."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from PIL import Image
from small_diffusion import write_pictures
from torch import nn

from hotloop.errors import DataError
from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.encoded import Cache, Side, Texts
from hotloop.recipes.diffusion.networks import weights_fingerprint
from hotloop.train import batches, configure


def picture(wide=64, high=64, mode="RGB", colour=(200, 40, 10)):
    return Image.new(mode, (wide, high), colour)


def put(place, name, image=None, caption=b"a red square", **options):
    """Write a picture, or the bytes of one, with a caption."""
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(image, bytes):
        path.write_bytes(image)
    else:
        (image or picture()).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_bytes(caption)
    return path


def load(place, *overrides):
    usual = [
        "recipe=diffusion",
        "pictures.size=64",
        "pictures.step=16",
        "pictures.min_size=32",
        "training.batch_size=2",
    ]
    return pictures.load(configure.load([*usual, f"pictures.path={place}", *overrides]))


def test_pictures_of_every_kind_are_found_in_subfolders_with_their_captions(tmp_path):
    for wide, name in enumerate(("a.png", "b.JPG", "c.jpeg", "deep/er/d.WebP", "deep/e.bmp"), start=64):
        put(tmp_path, name, picture(wide), caption=f"\ufeffthe picture\n  {name} ".encode())
    (tmp_path / "notes.md").write_text("left aside")
    put(tmp_path, ".hidden/f.png")
    put(tmp_path, "._g.png", b"of a Mac")
    found = load(tmp_path)
    assert found.names == ["a.png", "b.JPG", "c.jpeg", "deep/e.bmp", "deep/er/d.WebP"]
    assert found.captions == [f"the picture {name}" for name in found.names]
    assert (found.sizes, found.notes) == (((64, 64),), ())
    pixels = found.pixels(torch.arange(5))
    assert (pixels.shape, pixels.dtype) == ((5, 3, 64, 64), torch.float32)
    expected = torch.tensor([200, 40, 10]) / 127.5 - 1
    assert torch.allclose(pixels.mean(dim=(2, 3)), expected.expand(5, 3), atol=0.03)


def test_aspect_ratios_become_buckets_and_pictures_are_cropped_at_their_centre(tmp_path):
    wide = Image.new("RGB", (200, 100))
    wide.paste((255, 255, 255), (0, 0, 100, 100))  # the left half is white
    for index in range(4):
        put(tmp_path, f"w{index}.png", wide)
        put(tmp_path, f"s{index}.png")
    found = load(tmp_path)
    assert len(found.sizes) == 2
    high, across = found.sizes[int(found.bucket[-1])]
    assert across > high
    pixels = found.pixels((found.bucket == found.bucket[-1]).nonzero().flatten())
    assert pixels.shape == (4, 3, high, across)
    assert float(pixels[..., : across // 2 - 3].mean()) == pytest.approx(1, abs=0.02)
    assert float(pixels[..., across // 2 + 3 :].mean()) == pytest.approx(-1, abs=0.02)
    assert len(load(tmp_path, "training.batch_size=8").sizes) == 1  # no bucket fills a batch of 8


def test_what_cannot_be_used_stops_the_run_by_name_or_is_left_out(tmp_path):
    whole = put(tmp_path, "good.png").read_bytes()
    deep = Image.fromarray(np.full((64, 64), 0x8080, dtype="uint16"))
    put(tmp_path, "torn.png", whole[: len(whole) // 2])
    put(tmp_path, "text.png", b"this is text")
    put(tmp_path, "small.png", picture(20, 200))
    put(tmp_path, "silent.png", caption=None)
    put(tmp_path, "empty.png", caption=b"  \n ")
    put(tmp_path, "latin.png", caption="caf\xe9".encode("latin-1"))
    put(tmp_path, "sixteen.png", caption="text".encode("utf-16-le"))
    put(tmp_path, "steering.png", caption=b"a cat \x1b[2J")
    put(tmp_path, "deep.png", deep)
    picture().save(put(tmp_path, "gif.png"), "GIF")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    put(tmp_path, "a\x1b[31m\nb.png", caption=None)
    caption = "has no caption: expected text in UTF-8"
    expected = {
        "torn.png": "cannot be read: ", "text.png": "cannot be read: ", "gif.png": "cannot be read: ",
        "small.png": "has 20 x 200 pixels, fewer than pictures.min_size=32", "silent.png": caption,
        "empty.png": caption, "latin.png": "utf-8", "sixteen.png": caption, "steering.png": caption,
        "deep.png": "more than 8 bits of grey", "pipe.png": "is no plain file", "loop.png": "is no plain file",
        r"a\x1b[31m\nb.png": caption,
    }  # fmt: skip
    with pytest.raises(DataError) as raised:
        load(tmp_path)
    first, *lines, last = str(raised.value).splitlines()
    assert first == f"{len(expected)} pictures of {tmp_path} that cannot be used:"
    listed = dict(line.strip().split(": ", 1) for line in lines)
    assert listed.keys() == expected.keys()
    assert [name for name, reason in expected.items() if reason not in listed[name]] == []
    assert "pictures.skip_bad=true" in last
    left = load(tmp_path, "pictures.skip_bad=true")
    assert left.names == ["good.png"]
    assert left.notes[0].startswith(f"left out {first}")


@pytest.mark.parametrize("name", ["nowhere", "readme.md", ""])
def test_no_folder_and_no_pictures_are_told(tmp_path, name):
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(DataError, match=r"pictures\.path=\S+( has no pictures)?: expected"):
        load(tmp_path / name)


def test_a_path_that_is_not_set_is_told():
    with pytest.raises(DataError, match=r"pictures\.path=null: expected a folder"):
        pictures.load(configure.load(["recipe=diffusion"]))


def test_the_fingerprint_changes_with_a_caption_a_size_and_a_picture_and_not_with_its_time(tmp_path):
    for index in range(3):
        put(tmp_path, f"{index}.png")
    first = load(tmp_path).fingerprint()
    os.utime(tmp_path / "1.png", (1, 1))
    assert load(tmp_path).fingerprint() == first
    assert load(tmp_path, "pictures.size=80").fingerprint() != first
    (tmp_path / "1.txt").write_text("another caption")
    assert load(tmp_path).fingerprint() != first
    (tmp_path / "1.txt").write_text("a red square")
    put(tmp_path, "1.png", Image.effect_noise((64, 64), 50))
    assert load(tmp_path).fingerprint() != first


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        (picture(mode="RGBA", colour=(0, 0, 0, 0)), (255, 255, 255)),
        (picture(mode="RGBA", colour=(10, 20, 30, 255)), (10, 20, 30)),
        (picture(mode="LA", colour=(0, 0)), (255, 255, 255)),
        (picture(mode="L", colour=77), (77, 77, 77)),
        (picture(mode="1", colour=1), (255, 255, 255)),
        (picture().convert("P", palette=Image.Palette.ADAPTIVE), (200, 40, 10)),
    ],
)
def test_odd_kinds_of_pixels_become_the_colours_that_are_meant(tmp_path, image, colour):
    assert pictures.upright(put(tmp_path, "a.png", image)).getpixel((0, 0)) == colour


def test_a_picture_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # as a camera held upright writes it
    assert pictures.upright(put(tmp_path, "a.jpg", picture(60, 40), exif=exif)).size == (40, 60)


# -- what encoders give of them -----------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "cache"))
    return Cache(tmp_path, torch.device("cpu"), 8, print)


def test_rows_are_encoded_once_in_batches_of_one_size_and_of_another_key_anew(cache, tmp_path, monkeypatch):
    asked, names = [], [f"row {row}" for row in range(20)]

    def encode(rows):
        asked.append(len(rows))
        return {"mean": torch.tensor(rows).float()[:, None]}

    first = cache.kept("latents", ["a"], names, encode)["mean"]
    assert asked == [8, 8, 8]
    assert torch.equal(first, torch.arange(20.0)[:, None])
    assert torch.equal(cache.kept("latents", ["a"], names, encode)["mean"], first)
    assert len(asked) == 3
    cache.kept("latents", ["b"], names, encode)
    cache.kept("latents", ["a"], names[:8], encode)
    assert len(asked) == 7

    def full(tensors, path):
        raise RuntimeError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="cannot be written: No space left"):
        cache.kept("latents", ["c"], names, encode)
    assert len([one for one in tmp_path.rglob("*") if one.is_file()]) == 3


def test_numbers_that_are_not_finite_are_refused_by_the_name_of_their_row(cache, tmp_path):
    names = [f"row {row}" for row in range(20)]
    with pytest.raises(DataError, match="mean is not finite for row 13"):
        cache.kept("latents", [], names, lambda rows: {"mean": 1 / (torch.tensor(rows).float()[:, None] - 13)})
    assert not list(tmp_path.rglob("*.safetensors"))


def test_sides_of_several_buckets_are_data_for_the_fit_loop(tmp_path):
    found = load(write_pictures(tmp_path, 20, ((96, 64), (64, 64))), "training.batch_size=4")
    assert len(found.sizes) == 2
    moments = [{"mean": (found.bucket == index).nonzero().float()} for index in range(2)]
    captions = list(dict.fromkeys(found.captions))
    texts = Texts({text: row for row, text in enumerate(captions)}, {"input_ids": torch.arange(len(captions))})
    rows = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:14]
    side = Side(found, rows, texts, moments, {"time_ids": torch.arange(20)})
    seen = []
    for batch in (side.take(rows) for rows in batches.epoch_order(side, 4, 0, 0)):
        assert len(set(found.bucket[batch.labels].tolist())) == 1
        assert batch.inputs["mean"][:, 0].tolist() == batch.inputs["time_ids"].tolist() == batch.labels.tolist()
        read = [captions[one] for one in batch.inputs["input_ids"].tolist()]
        assert read == [found.captions[row] for row in batch.labels.tolist()]
        seen += batch.labels.tolist()
    assert set(seen) <= set(rows.tolist())
    assert len(seen) == len(set(seen)) == 4 * batches.per_epoch(side, 4)
    judged = [label for batch, count in batches.in_order(side, 4) for label in batch.labels[:count].tolist()]
    assert sorted(judged) == sorted(rows.tolist())
    assert (side.unfilled(4), side.unfilled(14), side.unfilled(4, together=3)) == (0, 14, 14)
    pixels = Side(found, rows, texts, None, {}).take((found.bucket[rows] == 0).nonzero()[:2, 0])
    assert set(pixels.inputs) == {"pixels", "input_ids"}


class Encoder(nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.zeros(3), persistent=False)
        self.config = {"channels": 4, **config}


def test_a_fingerprint_follows_weights_buffers_class_and_configuration():
    base = weights_fingerprint(Encoder())
    changed = [Encoder(), Encoder(), Encoder(channels=5), Encoder().to(torch.bfloat16), Encoder()]
    changed[0].scale.data += 1e-6
    changed[1].shift += 1
    changed[4].__class__ = type("Other", (Encoder,), {})
    assert len({base, *map(weights_fingerprint, changed)}) == 6
    assert weights_fingerprint(Encoder(_name_or_path="elsewhere", transformers_version="9")) == base
