"""The recipe `diffusion` on a GPU: it trains compiled, captured and in float16 as it does eagerly, and is resumed."""

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
from small_diffusion import model, pictures, small

import hotloop
from hotloop import recipes, record
from hotloop.recipes.diffusion import loading
from hotloop.recipes.diffusion.denoiser import Denoiser, mean_square
from hotloop.recipes.diffusion.noise import Noise
from hotloop.train import batches, checkpoint, start

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
SMALL = [
    *small(run__device="cuda", pictures__path=pictures(400)), "training.batch_size=32", "training.num_epochs=4",
    "training.ema_decay=0.995", "training.learning_rate=0.002",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def train(tmp_path):
    def run(*settings, folder="run"):
        return recipes.load("diffusion").train(start.prepare([*SMALL, f"run.folder={tmp_path / folder}", *settings]))

    return run


def losses(folder):
    return torch.tensor([one["loss"] for one in record.load(folder)["steps"]])


@pytest.mark.parametrize("precision", ["use_bf16", "use_fp16"])
def test_it_learns_in_half_precision(tmp_path, train, precision):
    train(f"training.optimization.{precision}=true")
    found = losses(tmp_path / "run")
    assert found.isfinite().all()
    assert found[-5:].mean() < found[:5].mean()
    if precision == "use_fp16":
        assert checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["others"]["scaler"]["scale"] >= 1


@pytest.mark.inductor
@pytest.mark.parametrize("preset", ["default", "reduce-overhead"])
def test_compiled_by_a_preset_it_trains_as_eager_does(tmp_path, train, preset):
    train(folder="eager")
    on = ["training.optimization.use_torch_compile=true", f"compile.preset={preset}", "compile.measure_eager_steps=2"]
    outcome = train(*on)
    assert outcome.components["unet"]["state"] == "compiled", outcome.components["unet"]
    assert {outcome.components[name]["running"] for name in ("text_encoder", "vae")} == {"none"}
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "eager")
    assert (ours[-10:].mean() - theirs[-10:].mean()).abs() < 0.1 * theirs[-10:].mean()


def test_auto_captures_the_step_with_its_noise_and_its_average(tmp_path, train):
    """The drawing of noise and timesteps, the average of the weights and AdamW are part of the recording."""
    train(folder="eager")
    outcome = train("training.optimization.use_torch_compile=auto", "training.num_epochs=40")
    assert outcome.status == "finished"
    running = {one["running"] for one in record.load(tmp_path / "run")["steps"]}
    assert any("graph" in tier for tier in running), outcome.notes
    assert losses(tmp_path / "run").isfinite().all()
    average = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")["others"]["model.average"]
    assert all(one.isfinite().all() for one in average.values())


def test_resumed_it_goes_on_from_where_it_was(tmp_path, train):
    train("training.max_steps=20", folder="whole")
    train("training.max_steps=20", "training.num_epochs=1")
    recipes.load("diffusion").train(start.prepare([f"run.resume={tmp_path / 'run'}", "training.num_epochs=4"]))
    ours, theirs = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(ours) == len(theirs) == 20
    first = 400 * 9 // 10 // 32
    # The first epoch has another schedule of the learning rate; the same noise is drawn, kernels may differ.
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-4)
    assert ours[first:].isfinite().all()


class Sizes(batches.Table):
    """Latents of three aspect ratios on the GPU."""

    apart, buckets = True, 3
    SHAPES = ((16, 16), (8, 32), (32, 8))

    def __init__(self, embedding):
        super().__init__({"embeddings": embedding.repeat(24, 1, 1)}, torch.arange(24))
        self.bucket = torch.arange(24) // 8

    def take(self, rows):
        (bucket,) = self.bucket[rows].unique().tolist()
        mean = torch.randn(len(rows), 4, *self.SHAPES[bucket], generator=torch.Generator().manual_seed(int(rows[0])))
        noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(int(rows[-1])))
        more = {"mean": mean, "logvar": mean - 30, "noise": noise, "timesteps": 40 * rows}
        return batches.Batch({**super().take(rows).inputs, **more}, rows).to(torch.device("cuda"))


def test_each_aspect_ratio_has_one_recording():
    torch.manual_seed(0)
    found = loading.load(str(model()), print)
    for one in found.modules().values():
        one.cuda().requires_grad_(requires_grad=False)
    found.unet.requires_grad_(requires_grad=True)
    denoiser = Denoiser(found, Noise(found.scheduler, "epsilon", 5.0).cuda(), embedded=True).cuda()
    data = Sizes(denoiser.empty.cpu())
    optimizer = torch.optim.AdamW(found.unet.parameters(), lr=1e-4, fused=True)
    with hotloop.Loop(found.unet, optimizer, state=denoiser, run="eager+graph", sentinel=0) as loop:

        @loop.step
        def step(given):
            loss = mean_square(denoiser(**given[0].inputs), given[0].labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for epoch in range(8):
            for rows in batches.epoch_order(data, 4, 0, epoch):
                assert step([data.take(rows)]).isfinite()
        assert loop.status().tier == "eager+graph", loop.status().decisions
        variants = loop._runners[0].capturing.kinds.values()
        assert [one.recording is not None for one in variants] == [True] * 3, "; ".join(
            str(one.declined) for one in variants
        )
