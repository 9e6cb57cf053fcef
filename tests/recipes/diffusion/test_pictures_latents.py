"""The cache of what encoders give: made once, reused, and of another key made anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hotloop.errors import DataError
from hotloop.recipes.diffusion import pictures
from hotloop.recipes.diffusion.pictures import latents, stored
from hotloop.train import batches, configure


class Encoder(nn.Module):
    """A VAE's encoder as the cache sees one, which counts what it is given."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.zeros(3), persistent=False)
        self.config = {"channels": 4, "_name_or_path": "here"}
        self.shapes = []

    def forward(self, pixels):
        assert not torch.is_grad_enabled()
        self.shapes.append(tuple(pixels.shape))
        small = nn.functional.avg_pool2d(pixels, 8) * self.scale
        return small, small - 1


class Words:
    """A text encoder as the cache sees one."""

    def __init__(self):
        self.seen = []

    def __call__(self, texts):
        self.seen += texts
        values = torch.tensor([[float(len(text)), float(sum(map(ord, text)))] for text in texts])
        return {
            "states": values[:, None].expand(-1, 3, -1) / 1000,
            "mask": torch.ones(len(texts), 3, dtype=torch.int64),
            "length": values[:, 0],
        }


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(stored, "PART", 16)
    monkeypatch.setattr(latents, "PART", 16)


@pytest.fixture
def digits():
    return pictures.load(configure.load(["recipe=diffusion", "data.sample_size=50"]))


@pytest.fixture
def cache(tmp_path):
    """Make a cache, and keep what it says and how far it got."""

    def make(**changes):
        said, progress = [], []
        made = stored.Cache(**{
            "folder": tmp_path / "cache", "key": {"vae": "a"}, "dtype": torch.float32, "batch_size": 8,
            "progress": lambda done, total: progress.append((done, total)), "say": said.append, **changes,
        })  # fmt: skip
        return made, said, progress

    return make


def test_pictures_are_encoded_once_in_batches_of_one_shape(digits, cache, tmp_path):
    encoder, (made, said, progress) = Encoder(), cache()
    first = latents.encode_pictures(digits, encoder, made)
    assert set(encoder.shapes) == {(8, 1, 16, 16)}
    assert progress == [(16, 50), (32, 50), (48, 50), (50, 50)]
    (store,) = (tmp_path / "cache").iterdir()
    assert said == [f"Cache of latents: 0 of 50 read from {store}; the others are made now"]
    rows = torch.tensor([49, 0, 17, 17])
    mean = nn.functional.avg_pool2d(digits.pixels(rows), 8) * 0.5
    assert torch.equal(first.take(rows)["mean"], mean)
    assert torch.equal(first.take(rows)["logvar"], mean - 1)
    encoder.shapes.clear()
    made, said, progress = cache()
    again = latents.encode_pictures(digits, encoder, made)
    assert encoder.shapes == []
    assert said[0].startswith("Cache of latents: 50 of 50 read from ")
    assert torch.equal(again.take(rows)["mean"], mean)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    "change", [{"key": {"vae": "b"}}, {"dtype": torch.bfloat16}, {"key": {"vae": "a", "tiling": "1"}}]
)
def test_another_key_is_encoded_anew(digits, cache, change):
    latents.encode_pictures(digits, Encoder(), cache()[0])
    encoder, (made, said, _) = Encoder(), cache(**change)
    found = latents.encode_pictures(digits, encoder, made)
    assert len(encoder.shapes) == 7
    assert said[0].startswith("Cache of latents: 0 of 50 read from ")
    assert found.take(torch.arange(3))["mean"].dtype == made.dtype


def test_other_pictures_or_captions_are_encoded_anew(digits, cache):
    latents.encode_pictures(digits, Encoder(), cache()[0])
    for other in (["data.sample_size=51"], ["data.sample_size=50", "run.seed=1"]):
        encoder, (made, said, _) = Encoder(), cache()
        latents.encode_pictures(pictures.load(configure.load(["recipe=diffusion", *other])), encoder, made)
        assert encoder.shapes
        assert said[0].startswith("Cache of latents: 0 of ")
        latents.encode_pictures(digits, encoder, cache()[0])  # is the last again


def part_of(tmp_path, index):
    (found,) = tmp_path.rglob(f"part-{index:05}.safetensors")
    return found


def test_a_part_that_is_torn_is_made_anew_with_a_word(digits, cache, tmp_path):
    rows = torch.arange(50)
    expected = latents.encode_pictures(digits, Encoder(), cache()[0]).take(rows)["mean"].clone()
    path = part_of(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-40])
    encoder, (made, said, _) = Encoder(), cache()
    found = latents.encode_pictures(digits, encoder, made)
    assert len(encoder.shapes) == 2  # sixteen rows of fifty
    assert said[0].startswith("Cache of latents: part-00001.safetensors cannot be read")
    assert torch.equal(found.take(rows)["mean"], expected)


def test_what_a_failed_write_left_is_gone_and_the_place_is_untouched(digits, cache, tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"part-00000\.safetensors cannot be written: No space left"):
        latents.encode_pictures(digits, Encoder(), cache()[0])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["key.json"]


def test_numbers_that_are_not_finite_are_refused_by_the_name_of_the_picture(digits, cache, tmp_path):
    def overflowing(pixels):
        mean = nn.functional.avg_pool2d(pixels, 8).clone()
        mean[2] = 1e30
        return mean, mean

    with pytest.raises(
        DataError, match=r"the VAE gave a mean that is not finite for digit \d+ and 1 more \(kept as torch.float16\)"
    ):
        latents.encode_pictures(digits, overflowing, cache(dtype=torch.float16)[0])
    assert not list(tmp_path.rglob("*.safetensors"))


def test_each_caption_is_embedded_once(digits, cache):
    words, (made, _, progress) = Words(), cache(key={"text_encoder": "x"})
    found = latents.encode_texts(["", *digits.captions, *digits.prompts], words, made)
    distinct = len({"", *digits.captions, *digits.prompts})
    assert (len(found.texts), progress[-1]) == (distinct, (distinct, distinct))
    rows = found.rows([digits.captions[3], ""])
    taken = found.take(rows)
    assert taken["states"].shape == (2, 3, 2)
    assert taken["mask"].dtype == torch.int64
    assert taken["states"][0, 0, 0] == torch.tensor(len(digits.captions[3]) / 1000)
    with pytest.raises(KeyError):
        found.rows(["never seen"])
    again = Words()
    latents.encode_texts(["", *digits.captions, *digits.prompts], again, cache(key={"text_encoder": "x"})[0])
    assert again.seen == []
    latents.encode_texts([*digits.captions], again, cache(key={"text_encoder": "x"})[0])
    assert again.seen


def test_a_fingerprint_follows_weights_buffers_class_and_configuration():
    base = latents.weights_fingerprint(Encoder())
    assert base == latents.weights_fingerprint(Encoder())
    changed = [Encoder() for _ in range(5)]
    changed[0].scale.data += 1e-6
    changed[1].shift += 1
    changed[2].config = {"channels": 5}
    changed[3].to(torch.bfloat16)
    changed[4].__class__ = type("Other", (Encoder,), {})
    assert len({base, *map(latents.weights_fingerprint, changed)}) == 6
    moved = Encoder()
    moved.config = {"channels": 4, "_name_or_path": "elsewhere", "transformers_version": "9"}
    assert latents.weights_fingerprint(moved) == base


def folder_of(tmp_path):
    from PIL import Image

    place = tmp_path / "pictures"
    place.mkdir()
    for index in range(20):
        wide = 64 if index % 2 else 96
        Image.new("RGB", (wide, 64), (index, 2 * index, 90)).save(place / f"{index:02}.png")
        (place / f"{index:02}.txt").write_text(f"picture {index % 3}")
    return pictures.load(configure.load([
        "recipe=diffusion", "data.sample_size=null", "pictures=folder", f"pictures.path={place}", "pictures.size=64",
        "pictures.step=16",
        "pictures.min_size=32", "training.batch_size=4",
    ]))  # fmt: skip


def test_sides_of_several_buckets_are_data_for_the_fit_loop(tmp_path, cache):
    found = folder_of(tmp_path)
    assert len(found.sizes) == 2
    moments = latents.encode_pictures(found, Encoder(), cache()[0])
    with pytest.raises(ValueError, match="rows of shapes"):
        moments.take(torch.arange(4))
    texts = latents.encode_texts(found.captions, Words(), cache()[0])
    rows = torch.arange(20)[torch.randperm(20, generator=torch.Generator().manual_seed(0))][:14]
    side = latents.Latents(found, moments, texts, rows)
    seen = []
    for batch in (side.take(rows) for rows in batches.epoch_order(side, 4, 0, 0)):
        assert list(batch.inputs)[:2] == ["mean", "logvar"]
        assert set(batch.inputs) == {"mean", "logvar", "states", "mask", "length"}
        (bucket,) = set(found.bucket[batch.labels].tolist())
        high, wide = found.sizes[bucket]
        assert batch.inputs["mean"].shape == (4, 3, high // 8, wide // 8)
        assert torch.equal(batch.inputs["mean"], nn.functional.avg_pool2d(found.pixels(batch.labels), 8) * 0.5)
        own = texts.take(texts.rows([found.captions[row] for row in batch.labels.tolist()]))
        assert torch.equal(batch.inputs["states"], own["states"])
        seen += batch.labels.tolist()
    assert set(seen) <= set(rows.tolist())
    assert len(seen) == len(set(seen)) == 4 * batches.per_epoch(side, 4)
    judged = [label for batch, count in batches.in_order(side, 4) for label in batch.labels[:count].tolist()]
    assert sorted(judged) == sorted(rows.tolist())
    assert side.unfilled(4) == 0
    assert side.unfilled(14) == 14
    assert side.unfilled(4, together=3) == 14, "the batches of a step are of one size"


def test_tokens_take_the_place_of_embeddings_where_the_text_encoder_is_trained(digits):
    captions = latents.distinct([*digits.captions, ""])
    tokens = latents.Tensors({"input_ids": torch.arange(len(captions))[:, None].expand(-1, 5)})
    moments = latents.Tensors({"mean": torch.zeros(50, 4, 2, 2), "logvar": torch.zeros(50, 4, 2, 2)})
    side = latents.Latents(digits, moments, latents.Texts(captions, tokens))
    batch = side.take(torch.tensor([7, 3]))
    assert [captions[row] for row in batch.inputs["input_ids"][:, 0].tolist()] == [
        digits.captions[7],
        digits.captions[3],
    ]
    assert batch.labels.tolist() == [7, 3]


def test_the_networks_of_diffusers_and_transformers_are_cached_as_they_are(digits, cache):
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    vae = AutoencoderKL(in_channels=1, out_channels=1, block_out_channels=(8, 8), norm_num_groups=4, latent_channels=2,
                        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2).eval()  # fmt: skip
    text = CLIPTextModel(CLIPTextConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                        num_attention_heads=2, max_position_embeddings=6, eos_token_id=63)).eval()  # fmt: skip

    def encode(pixels):
        posterior = vae.encode(pixels).latent_dist
        return posterior.mean, posterior.logvar

    key = {"vae": latents.weights_fingerprint(vae), "text_encoder": latents.weights_fingerprint(text)}
    alike, scaled = (AutoencoderKL(**{**vae.config, **more}) for more in ({}, {"scaling_factor": 0.5}))
    for one in (alike, scaled):  # the weights are the same, and one number of the configuration is not
        one.load_state_dict(vae.state_dict())
    assert latents.weights_fingerprint(alike) == key["vae"] != latents.weights_fingerprint(scaled)
    moments = latents.encode_pictures(digits, encode, cache(key=key)[0])
    ids = torch.tensor([[1, 2, 3, 63, 0, 0]])
    texts = latents.encode_texts(
        digits.captions, lambda some: {"states": text(ids.expand(len(some), -1)).last_hidden_state}, cache(key=key)[0]
    )
    batch = latents.Latents(digits, moments, texts).take(torch.tensor([4, 44]))
    assert {name: tuple(one.shape) for name, one in batch.inputs.items()} == {
        "mean": (2, 2, 8, 8), "logvar": (2, 2, 8, 8), "states": (2, 6, 8),
    }  # fmt: skip
    assert torch.allclose(batch.inputs["mean"], encode(digits.pixels(torch.tensor([4, 44])))[0], atol=1e-5)


def test_two_runs_may_encode_the_same_at_the_same_time(digits, cache, tmp_path):
    """Each finds the other's parts, or writes its own over them: the place always holds a whole one."""
    rows, found = torch.arange(50), []
    other = Encoder()

    class Meeting(Encoder):
        def forward(self, pixels):
            if not found:  # the other run does all of it in the midst of ours
                found.append(latents.encode_pictures(digits, other, cache()[0]))
            return super().forward(pixels)

    ours = latents.encode_pictures(digits, Meeting(), cache()[0])
    assert other.shapes
    assert torch.equal(ours.take(rows)["mean"], found[0].take(rows)["mean"])
    assert not list(tmp_path.rglob("*.part"))
