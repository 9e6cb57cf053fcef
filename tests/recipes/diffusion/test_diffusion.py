"""The recipe `diffusion`: it learns, is judged, resumed, compiled by component, and leaves what diffusers loads."""

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from small_diffusion import model, small, write_pictures

from hotloop import recipes, record
from hotloop.errors import ConfigError, DataError
from hotloop.recipes.diffusion import Cache, loading, pictures
from hotloop.recipes.diffusion.sampling import Sampler
from hotloop.train import checkpoint, compiling, configure, fit, start
from hotloop.train.search import preparing

RECIPE = recipes.load("diffusion")


@pytest.fixture
def train(tmp_path):
    """Train a small one into ``folder``; gives its outcome."""

    def run(*settings, folder="run"):
        return RECIPE.train(start.prepare([*small(), f"run.folder={tmp_path / folder}", *settings]))

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that wrote its pipeline: its folder, and its outcome."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    settings = ["diffusion.output=true", "diffusion.sample_every=4", f"run.folder={folder}"]
    return folder, RECIPE.train(start.prepare([*small(), *settings]))


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


def same(ours, theirs):
    assert list(ours) == list(theirs)
    return all(torch.equal(one, theirs[name]) for name, one in ours.items())


def test_it_learns_and_a_checkpoint_is_judged_as_the_run_judged_it(trained):
    folder, outcome = trained
    document = record.load(folder)
    assert document["steps"][-1]["loss"] < document["steps"][0]["loss"]
    kept = load(folder, "best.pt")
    average, kept_model = kept["others"]["model.average"], kept["model"]["model"]
    assert set(average) == set(kept_model)
    assert {name.partition(".")[0] for name in kept_model} == {"unet"}, "the model's folder has what is frozen"
    assert not same(average, kept_model)
    judged = RECIPE.evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(outcome.best, rel=1e-6)
    assert set(outcome.best) == set(preparing.METRICS["diffusion"])


def test_the_pipeline_it_leaves_is_loaded_by_diffusers_and_draws_what_the_run_drew(trained):
    folder, _ = trained
    sheets = sorted(one.name for one in (folder / "samples").iterdir())
    assert sheets == ["step-000004.png", "step-000008.png", "step-000009.png"]
    pipe = DiffusionPipeline.from_pretrained(folder / "pipeline", use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    averages = load(folder)["others"]["model.average"]
    assert same({f"unet.{name}": one for name, one in pipe.unet.state_dict().items()}, averages), "the averages"
    prompts = ("a handwritten two", "a handwritten three")
    sampler = Sampler(
        networks=loading.load(str(folder / "pipeline"), print), prediction="epsilon", prompts=prompts, size=(8, 8),
        steps=2, guidance=3.0, batch=4, seed=0,
    )  # fmt: skip
    asked = {"num_inference_steps": 2, "height": 8, "width": 8, "output_type": "pt", "guidance_scale": 3.0}
    theirs = pipe(prompts[1], generator=torch.Generator().manual_seed(1), **asked).images
    torch.testing.assert_close(sampler.make(1)[1:], theirs * 2 - 1, rtol=1e-4, atol=1e-4)
    assert not any("_orig_mod" in one.read_text() for one in folder.glob("pipeline/*/config.json"))


def test_settings_of_the_training_reach_what_they_are_for(tmp_path):
    settings = configure.load([
        *small(), "diffusion.gradient_checkpointing=true", "diffusion.min_snr_gamma=3",
        "diffusion.prediction=v_prediction", "diffusion.noise_offset=0.3", "diffusion.caption_dropout=0.25",
        "diffusion.cache=false",
    ])  # fmt: skip
    found = pictures.load(settings)
    rows, networks = RECIPE.split(found, settings), RECIPE.load_networks(settings, found, print)
    cache = Cache(tmp_path, torch.device("cpu"), 8, print)
    made = RECIPE.make(settings, networks, found, rows, cache=cache, weights=None)
    assert networks.unet.is_gradient_checkpointing
    assert (made.denoiser.noise.gamma, made.denoiser.noise.prediction) == (3.0, "v_prediction")
    assert (made.denoiser._noise_offset, made.denoiser._caption_dropout) == (0.3, 0.25)
    assert set(made.train.take(torch.arange(2)).inputs) == {"pixels", "input_ids"}


def test_samples_on_the_way_change_nothing(train, tmp_path, trained):
    train()
    assert same(load(tmp_path / "run")["model"]["model"], load(trained[0])["model"]["model"])


def interrupted(train, monkeypatch, at, *settings):
    """Train until a signal after a step; the run saves and stops."""
    whole = fit._Fitting.step

    def acting(self, given):
        whole(self, given)
        if self.position.step == at:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(fit._Fitting, "step", acting)
        assert train(*settings).status == "interrupted"


@pytest.mark.campaign
@pytest.mark.parametrize(
    "settings",
    [
        ("diffusion.noise_offset=0.1", "training.optimization.use_bf16=true"),
        ("diffusion.train_text_encoder=true", "diffusion.prediction=v_prediction"),
        ("diffusion.lora_rank=2",),
        ("diffusion.cache=false", "diffusion.gradient_checkpointing=true"),
    ],
    ids=["full", "text", "lora", "uncached"],
)
def test_resumed_from_a_checkpoint_it_is_the_run_that_was_not_interrupted(tmp_path, train, monkeypatch, settings):
    """Bit for bit: weights, averages, optimizer, and validation."""
    train(*settings, folder="whole")
    interrupted(train, monkeypatch, 3, *settings)
    RECIPE.train(start.prepare([f"run.resume={tmp_path / 'run'}"]))
    ours, theirs = load(tmp_path / "run"), load(tmp_path / "whole")
    assert ours["position"] == theirs["position"]
    assert same(ours["model"]["model"], theirs["model"]["model"])
    assert same(ours["others"]["model.average"], theirs["others"]["model.average"])
    steps = ours["others"]["optimizer"]["state"]
    assert all(same(one, theirs["others"]["optimizer"]["state"][key]) for key, one in steps.items())


@pytest.mark.campaign
def test_adapters_are_what_a_checkpoint_of_lora_holds_and_what_diffusers_loads(tmp_path, train, capsys):
    lora = ["diffusion.lora_rank=2", "diffusion.lora_alpha=4", "diffusion.output=true"]
    outcome = train(*lora, "diffusion.train_text_encoder=true", "training.ema_decay=null")
    printed = capsys.readouterr().out.splitlines()
    network, told = record.load(tmp_path / "run")["told"]["model"]
    assert {f"Model: {network}", told} <= set(printed), "the report has the figures that were printed"
    assert told.startswith("Trained: adapters of rank 2 on the UNet and the text encoder, ")
    kept = load(tmp_path / "run")["model"]["model"]
    assert all("lora" in name for name in kept)
    assert {name.split(".")[0] for name in kept} == {"unet", "text_encoder"}
    assert not (tmp_path / "run" / "pipeline").exists()
    pipe = StableDiffusionPipeline.from_pretrained(model(), use_safetensors=True)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    assert pipe.unet.peft_config["default_0"].lora_alpha == 4
    theirs = {name.replace("default_0", "default"): one for name, one in pipe.unet.state_dict().items()}
    ours = {name.removeprefix("unet."): one for name, one in kept.items() if name.startswith("unet.")}
    assert all(torch.equal(one, theirs[name]) for name, one in ours.items())
    assert any(bool(one.any()) for name, one in ours.items() if "lora_B" in name), "they were trained"
    best = load(tmp_path / "run", "best.pt")
    judged = RECIPE.evaluate(configure.from_dict(best["settings"]), checkpoint.weights(best))
    assert judged == pytest.approx(outcome.best, rel=1e-6)
    with pytest.raises(ConfigError, match=r"diffusion\.lora_rank.*: cannot change while"):
        start.prepare([f"run.resume={tmp_path / 'run'}", "diffusion.lora_rank=4"])
    other = configure.from_dict(best["settings"], ["diffusion.lora_rank=4"])
    with pytest.raises(ConfigError, match=r"do not fit diffusion\.model=.* with diffusion\.lora_rank=4: "):
        RECIPE.evaluate(other, checkpoint.weights(best))


@pytest.mark.campaign
def test_float16_leaves_out_the_steps_that_overflow_and_keeps_its_scale(tmp_path, train, monkeypatch):
    outcome = train("training.optimization.use_fp16=true", "training.max_steps=4")
    assert outcome.status == "finished"
    scaler = load(tmp_path / "run")["others"]["scaler"]
    norms = [one["gradient_norm"] for one in record.load(tmp_path / "run")["steps"]]
    assert scaler["scale"] == 2**16 / 2 ** sum(norm in ("inf", "nan") for norm in norms)
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**40))
    train("training.optimization.use_fp16=true", "training.max_steps=3", folder="over")
    assert all(one["gradient_norm"] in ("inf", "nan") for one in record.load(tmp_path / "over")["steps"])
    assert load(tmp_path / "over")["others"]["scaler"]["scale"] == 2**37
    assert not load(tmp_path / "over")["others"]["optimizer"]["state"], "all three were left out"


ON = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager", "compile.measure_eager_steps=0"]


def test_only_the_unet_is_compiled_unless_settings_say_otherwise():
    chosen = compiling.plan(configure.load([*small(), *ON]), RECIPE.COMPONENTS)
    assert {name: [one.name for one in both] for name, both in chosen.items()} == {"unet": ["aot_eager", "none"]}
    more = [f"compile.components.{name}.inference=aot_eager" for name in ("text_encoder", "vae")]
    chosen = compiling.plan(configure.load([*small(), *ON, *more]), RECIPE.COMPONENTS)
    assert list(chosen) == ["unet", "text_encoder", "vae"]


@pytest.mark.campaign
def test_each_component_is_compiled_as_its_setting_says_and_the_report_shows_all_three(tmp_path, train):
    """Text encoder and VAE run in each step here, and without gradients: their presets are those of inference."""
    outcome = train(
        *ON, "diffusion.cache=false", "compile.components.text_encoder.inference=aot_eager", "training.max_steps=2",
        "data.sample_size=40", "training.ema_decay=null",
    )  # fmt: skip
    states = {name: one["state"] for name, one in outcome.components.items()}
    assert states == {"unet": "compiled", "text_encoder": "compiled", "vae": "eager", "loss": "eager"}
    unet = outcome.components["unet"]
    assert (unet["modes"]["training"]["compiles"], unet["recompiles"], unet["graph_breaks"]) == (1, 0, 0)
    assert not any("_orig_mod" in name for name in load(tmp_path / "run")["model"]["model"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(name in page for name in states)
    assert list(record.load(tmp_path / "run")["components"]) == list(states)


def test_auto_owns_the_step_and_compiles_the_unet_alone(train):
    outcome = train("training.optimization.use_torch_compile=auto", "training.max_steps=4")
    assert {one["requested"] for one in outcome.components.values()} == {"auto"}
    assert outcome.components["vae"]["running"] == "eager"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["diffusion.prediction=sample"], r"diffusion\.prediction.*epsilon"),
        (["diffusion.min_snr_gamma=0"], r"diffusion\.min_snr_gamma"),
        (["diffusion.guidance=0.5"], r"diffusion\.guidance"),
        (["diffusion.model=''"], r"diffusion\.model=.*String should match"),
        (["diffusion.model=./nowhere"], r"diffusion\.model=\./nowhere: no such folder"),
        (["pictures.step=2", "pictures.size=10"], r"takes multiples of 8 a side: set pictures\.step=8"),
        (["compile.components.unett.training=none"], r"unett: no such component; expected one of unet, text_encoder, "),
        (["pictures.size=20"], r"pictures\.size=20 is no multiple of pictures\.step=8"),
        (["diffusion.train_text_encoder_2=true"], r"train_text_encoder_2=true: .* has one text encoder"),
        ([*ON, "compile.components.text_encoder_2.inference=aot_eager"], r"text_encoder_2: .* has one text encoder"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(train, settings, said):
    with pytest.raises(ConfigError, match=said):
        train(*settings)


def test_a_model_of_another_kind_or_without_safetensors_is_refused(tmp_path, train):
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ConfigError, match="is a FluxPipeline; expected a StableDiffusionPipeline"):
        train(f"diffusion.model={other}")
    pickled = tmp_path / "pickled"
    shutil.copytree(model(), pickled)
    weights = pickled / "unet" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    with pytest.raises(ConfigError, match=r"diffusion\.model=.* cannot be loaded: .*no \.bin"):
        train(f"diffusion.model={pickled}")


@pytest.mark.parametrize(
    ("part", "file", "said"),
    [
        ({"_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"}, "text_encoder/config.json", ""),
        ({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}, "tokenizer/tokenizer_config.json",
         "contains custom code"),
        ({"base_model_name_or_path": "/elsewhere"}, "text_encoder/adapter_config.json", "adapters beside its text|cannot be"),
        ({"in_channels": 9}, "unet/config.json", "cannot be loaded"),
        ({"class_embed_type": "timestep"}, "unet/config.json", "its unet has no weights for class_embedding"),
    ],
)  # fmt: skip
def test_nothing_that_a_models_folder_names_is_run_or_loaded_instead(tmp_path, part, file, said):
    place = tmp_path / "hostile"
    shutil.copytree(model(), place)
    (place / "tokenizer" / "own.py").write_text("raise SystemExit('it was run')")
    before = json.loads((place / file).read_text()) if (place / file).exists() else {}
    (place / file).write_text(json.dumps({**before, **part}))
    with pytest.raises(ConfigError, match=said) if said else contextlib.nullcontext():
        found = loading.load(str(place), print)
        found.check([(8, 8)])
        assert found.text_encoder.config._attn_implementation == "sdpa"


def test_a_hub_that_does_not_answer_is_said(train, monkeypatch):
    monkeypatch.setattr("hotloop.train.hub.unreachable", lambda *given: "ConnectError: no network")
    with pytest.raises(ConfigError, match=r"diffusion\.model='someone/model' cannot be loaded: .*no network"):
        train("diffusion.model=someone/model")


@pytest.mark.campaign
def test_a_folder_of_pictures_of_several_sizes_is_trained_on_and_sampled(tmp_path, train):
    folder = write_pictures(tmp_path / "pictures", 36, ((32, 32), (48, 24), (24, 48)))
    Image.new("RGB", (32, 32)).save(folder / "<i>.png")
    train(
        f"pictures.path={folder}", "pictures.size=32", "pictures.skip_bad=true", "training.batch_size=4",
        "training.max_steps=3", "diffusion.output=true", "training.optimization.use_torch_compile=auto",
    )  # fmt: skip
    document = record.load(tmp_path / "run")
    data, left_out, *bad = document["told"]["data"]
    assert data.startswith("36 pictures; width x height: ")
    assert left_out.startswith("left out 1 pictures of ")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "&lt;i&gt;.png: has no caption" in page
    assert "<i>.png" not in page
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 1
    assert (tmp_path / "run" / "pipeline" / "model_index.json").is_file()


def test_a_resumed_run_takes_its_pictures_from_elsewhere_as_long_as_they_are_the_same(tmp_path, train):
    folder, moved = write_pictures(tmp_path / "pictures", 12), tmp_path / "moved"
    train(f"pictures.path={folder}", "training.batch_size=4", "training.max_steps=1")
    folder.rename(moved)
    again = [f"run.resume={tmp_path / 'run'}", f"pictures.path={moved}"]
    more = ["diffusion.samples=2", "diffusion.gradient_checkpointing=true", "training.max_steps=2"]
    assert RECIPE.train(start.prepare([*again, *more])).step == 2
    for changed in ("pictures.size=16", "diffusion.noise_offset=0.1"):
        with pytest.raises(ConfigError, match=rf"{changed.partition('=')[0]}.*: cannot change while"):
            start.prepare([*again, changed])
    (moved / "000.txt").write_text("another caption")
    with pytest.raises(DataError, match="was trained on other data"):
        RECIPE.train(start.prepare(again))


@pytest.mark.campaign
@pytest.mark.long
def test_two_devices_share_the_pictures_and_one_makes_what_all_read(tmp_path):
    settings = [one for one in small() if not one.startswith("run.device")]
    more = ["run.accelerator=cpu", "run.devices=2", "training.max_steps=4", "diffusion.output=true"]
    command = [sys.executable, "-W", "ignore", "-m", "hotloop", "train", *settings, *more]
    folders = {"HOTLOOP_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([*command, f"run.folder={tmp_path / 'run'}"], check=True, timeout=900, env={**os.environ, **folders})
    assert len(list((tmp_path / "cache" / "pictures").glob("latents-*"))) == 1
    assert StableDiffusionPipeline.from_pretrained(tmp_path / "run" / "pipeline") is not None
    kept = load(tmp_path / "run", "best.pt")
    judged = RECIPE.evaluate(configure.from_dict(kept["settings"]), checkpoint.weights(kept))
    assert judged == pytest.approx(kept["position"]["best"], rel=1e-4)
