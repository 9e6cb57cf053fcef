"""A folder of one's own: what is taken, what is listed with its reason, and what a damaged file does."""

from __future__ import annotations

import io
import os
import struct
import threading
import warnings
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hotloop.errors import DataError
from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.pictures import decode, folder
from hotloop.train import configure


def picture(wide=64, high=64, mode="RGB", colour=(200, 40, 10)):
    return Image.new(mode, (wide, high), colour)


def put(place, name, image=None, caption="a red square", **options):
    """Write a picture, or the bytes of one, with a caption."""
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(image, bytes):
        path.write_bytes(image)
    else:
        (image or picture()).save(path, **options)
    if caption is not None:
        path.with_suffix(".txt").write_bytes(caption if isinstance(caption, bytes) else caption.encode())
    return path


def load(place, *overrides):
    usual = ["recipe=diffusion", "data.sample_size=null", "pictures=folder", "pictures.size=64", "pictures.step=16", "pictures.min_size=32",
             "training.batch_size=2"]  # fmt: skip
    return pictures.load(configure.load([*usual, f"pictures.path={place}", *overrides]))


def as_bytes(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def bomb(wide, high):
    """A PNG of some bytes that claims any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_pictures_of_every_kind_are_found_in_subfolders_with_their_captions(tmp_path):
    for wide, name in enumerate(("a.png", "b.JPG", "c.jpeg", "deep/er/d.WebP", "deep/e.bmp"), start=64):
        put(tmp_path, name, picture(wide), caption=f"\ufeffthe picture\n  {name} ")
    (tmp_path / "notes.md").write_text("left aside")
    put(tmp_path, ".hidden/f.png")
    put(tmp_path, "._g.png", b"of a Mac")
    found = load(tmp_path)
    assert found.names == ["a.png", "b.JPG", "c.jpeg", "deep/e.bmp", "deep/er/d.WebP"]
    assert found.captions == [f"the picture {name}" for name in found.names]
    assert (found.labels, found.channels, found.sizes) == (None, 3, ((64, 64),))
    assert found.notes == ()
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
    rows = (found.bucket == found.bucket[-1]).nonzero().flatten()
    high, across = found.sizes[int(found.bucket[-1])]
    assert across > high
    pixels = found.pixels(rows)
    assert pixels.shape == (4, 3, high, across)
    assert float(pixels[..., : across // 2 - 3].mean()) == pytest.approx(1, abs=0.02)
    assert float(pixels[..., across // 2 + 3 :].mean()) == pytest.approx(-1, abs=0.02)
    with pytest.raises(ValueError, match="rows of one bucket, got rows of 2"):
        found.pixels(torch.arange(8))
    assert len(load(tmp_path, "training.batch_size=8").sizes) == 1  # no bucket fills a batch of 8


def bad_folder(place):
    """A folder with one good picture, and one of each fault; gives what the listing says of each."""
    put(place, "good.png")
    whole = as_bytes(Image.effect_noise((64, 64), 50).convert("RGB"), "JPEG")
    put(place, "torn.jpg", whole[: len(whole) // 2])
    put(place, "text.png", b"this is text")
    put(place, "nothing.png", b"")
    put(place, "small.png", picture(20, 200))
    put(place, "large.png", bomb(9_500, 9_500))
    put(place, "silent.png", caption=None)
    put(place, "empty.png", caption="  \n ")
    put(place, "latin.png", caption="caf\xe9".encode("latin-1"))
    put(place, "sixteen.png", caption="text".encode("utf-16-le"))
    put(place, "steering.png", caption="a cat \x1b[2J")
    put(place, "long.png", caption="word " * 20_000)
    put(place, "gif.png", as_bytes(picture(), "GIF"))
    os.mkfifo(place / "pipe.png")
    (place / "loop.png").symlink_to("loop.png")
    return {
        "torn.jpg": "cannot be read: image file is truncated",
        "text.png": "is not readable as PNG, JPEG, WEBP, BMP",
        "nothing.png": "is not readable as PNG",
        "small.png": "has 20 x 200 pixels, fewer than pictures.min_size=32",
        "large.png": "has 90,250,000 pixels, more than 89,478,485",
        "silent.png": "has no caption: expected silent.txt",
        "empty.png": "has an empty caption, empty.txt",
        "latin.png": "that is not UTF-8",
        "sixteen.png": "with a control character: expected text in UTF-8",
        "steering.png": "with a control character",
        "long.png": "that has more than 65,536 bytes",
        "gif.png": "is not readable as PNG",
        "pipe.png": "is no plain file",
        "loop.png": "is no plain file",
    }


def test_all_that_cannot_be_used_is_listed_by_name_with_the_reason(tmp_path):
    expected = bad_folder(tmp_path / "p")
    with pytest.raises(DataError) as raised:
        load(tmp_path / "p")
    lines = str(raised.value).splitlines()
    assert lines[0] == f"{len(expected)} pictures of {tmp_path / 'p'} that cannot be used:"
    listed = dict(line.strip().split(": ", 1) for line in lines[1:-1])
    assert listed.keys() == expected.keys()
    for name, reason in expected.items():
        assert reason in listed[name], (name, listed[name])
    assert lines[-1] == "Mend these, or leave them out with pictures.skip_bad=true"


def test_bad_pictures_can_be_left_out_and_that_is_said(tmp_path):
    expected = bad_folder(tmp_path / "p")
    found = load(tmp_path / "p", "pictures.skip_bad=true")
    assert found.names == ["good.png"]
    assert found.notes[0].startswith(f"left out {len(expected)} pictures of")
    assert "small.png: has 20 x 200 pixels" in found.notes[0]


def test_an_interrupt_does_not_wait_for_all_the_others(tmp_path, monkeypatch):
    for index in range(40):
        put(tmp_path, f"{index:02}.png")
    looked_at, examine, over = [], folder._examine, threading.Event()

    class Pool(decode.ThreadPoolExecutor):
        def shutdown(self, *args, **kwargs):
            over.set()
            super().shutdown(*args, **kwargs)

    def slowly(root, one, min_size):
        looked_at.append(one)
        assert one.name == "00.png" or over.wait(300)
        return examine(root, one, min_size)

    def interrupt(done, total):
        assert total == 40
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(folder, "_examine", slowly)
    with pytest.raises(KeyboardInterrupt):
        folder.load(str(tmp_path), 32, skip_bad=False, progress=interrupt)
    assert len(looked_at) < 40


def test_a_listing_has_a_bounded_length(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LISTED", 20)
    for index in range(25):
        put(tmp_path, f"{index:02}.png", caption=None)
    with pytest.raises(
        DataError, match=r"25 pictures of .*(?s:.*)19\.png: has no caption.*\n  and 5 more\nNone can be used"
    ):
        load(tmp_path, "pictures.skip_bad=true")


def test_no_folder_and_no_pictures_are_told(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        load(tmp_path / "nowhere")
    (tmp_path / "readme.md").write_text("x")
    with pytest.raises(DataError, match=r"has no pictures: expected \.png.* each with a \.txt"):
        load(tmp_path)
    with pytest.raises(DataError, match="this is a file"):
        load(tmp_path / "readme.md")


def test_a_name_reaches_no_terminal_as_it_is(tmp_path):
    put(tmp_path, "a\x1b[31m\nb.png", caption=None)
    (tmp_path / os.fsdecode(b"\xff.png")).write_bytes(as_bytes(picture()))
    with pytest.raises(DataError) as raised:
        load(tmp_path)
    assert r"a\x1b[31m\nb.png: has no caption" in str(raised.value)
    assert r"\xff.png: has no caption" in str(raised.value)
    str(raised.value).encode()


def test_the_fingerprint_changes_with_any_byte_and_a_picture_that_changes_in_a_run_is_refused(tmp_path):
    for index in range(3):
        put(tmp_path, f"{index}.png", picture(colour=(index, 0, 0)))
    first = load(tmp_path)
    assert first.fingerprint() == load(tmp_path).fingerprint()
    (tmp_path / "1.txt").write_text("another caption")
    assert load(tmp_path).fingerprint() != first.fingerprint()
    (tmp_path / "1.txt").write_text("a red square")
    assert load(tmp_path).fingerprint() == first.fingerprint()
    assert load(tmp_path, "pictures.size=80").fingerprint() != first.fingerprint()
    put(tmp_path, "1.png", picture(colour=(99, 0, 0)))
    assert load(tmp_path).fingerprint() != first.fingerprint()
    with pytest.raises(DataError, match=r"1\.png: it was another file when the run began"):
        first.pixels(torch.arange(3))
    (tmp_path / "2.png").unlink()
    with pytest.raises(DataError, match=r"2\.png is no plain file.*: it was another file"):
        first.pixels(torch.tensor([2]))


def test_copies_of_a_picture_are_told(tmp_path):
    put(tmp_path, "a.png")
    put(tmp_path, "b.png")
    assert load(tmp_path).notes == ("copies of other pictures, byte for byte: 1; they may be on both sides of a split",)


def pixel(image, kind="PNG", **options):
    return decode.upright(as_bytes(image, kind, **options)).getpixel((0, 0))


def test_odd_kinds_of_pixels_become_the_colours_that_are_meant():
    assert pixel(picture(mode="RGBA", colour=(0, 0, 0, 0))) == (255, 255, 255)
    assert pixel(picture(mode="RGBA", colour=(10, 20, 30, 255))) == (10, 20, 30)
    assert pixel(picture(mode="LA", colour=(0, 0))) == (255, 255, 255)
    assert pixel(picture(mode="L", colour=77)) == (77, 77, 77)
    assert pixel(picture(mode="1", colour=1)) == (255, 255, 255)
    deep = Image.fromarray(np.full((8, 8), 0x8080, dtype="uint16"))
    assert deep.mode.startswith("I")
    assert pixel(deep) == (128, 128, 128)
    palette = picture(mode="RGB").convert("P", palette=Image.Palette.ADAPTIVE)
    assert pixel(palette) == (200, 40, 10)
    index = palette.getpixel((0, 0))
    assert pixel(palette, transparency=index) == (255, 255, 255)
    assert pixel(picture(), transparency=(200, 40, 10)) == (255, 255, 255)
    several = as_bytes(picture(), "MPO", save_all=True, append_images=[picture(colour="blue")])  # as phones write it
    assert np.allclose(decode.upright(several).getpixel((0, 0)), (200, 40, 10), atol=4)
    red = pixel(picture(mode="CMYK", colour=(0, 255, 255, 0)), "JPEG", quality=100)
    assert np.allclose(red, (255, 0, 0), atol=4)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_as_its_exif_says(kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # as a camera held upright writes it
    lying = picture(60, 40)
    assert decode.upright(as_bytes(lying, kind, exif=exif)).size == (40, 60)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]), st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), max_size=8),
       st.floats(0.05, 1))  # fmt: skip
def test_a_damaged_file_is_decoded_or_refused_with_a_reason(kind, damage, kept):
    data = bytearray(as_bytes(Image.effect_noise((24, 24), 60).convert("RGB"), kind))
    for where, value in damage:
        data[int(where * (len(data) - 1))] = value
    refused = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the look at a folder does
        try:
            mode = decode.upright(bytes(data[: int(kept * len(data))])).mode
        except decode.UnusableError as error:
            mode, refused = "", str(error)
    assert mode == "RGB" or refused.startswith(("cannot be read: ", "is not readable", "has "))
