"""SDXL: trained as a bare loop of diffusers' classes trains it, sampled, exported and switched part by part."""

import copy
import json
import shutil

import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from sdxl_folder import parts, write
from small_diffusion import small
from transformers import CLIPTextModel

import hotloop
from hotloop import recipes, record
from hotloop.errors import ConfigError
from hotloop.recipes.diffusion import Cache, loading, pictures
from hotloop.recipes.diffusion.denoiser import Denoiser, mean_square
from hotloop.recipes.diffusion.noise import Noise
from hotloop.recipes.diffusion.sampling import Sampler
from hotloop.testing import captured_step_emulation
from hotloop.train import batches, checkpoint, configure, start

RECIPE = recipes.load("diffusion")
TEXTS = ("text_encoder", "text_encoder_2")


def sdxl(model):
    """The settings of a short run of it."""
    return small(
        diffusion__model=model, pictures__size=16, pictures__step=16, data__sample_size=40, training__batch_size=8,
        training__eval_batch_size=8, training__max_steps=3, training__ema_decay="null",
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("sdxl"))


@pytest.fixture
def train(tmp_path, folder):
    """Train a tiny SDXL into ``run``; gives its outcome."""

    def run(*settings, model=folder, into="run"):
        return RECIPE.train(start.prepare([*sdxl(model), f"run.folder={tmp_path / into}", *settings]))

    return run


def load(folder, name="last.pt"):
    return checkpoint.load(folder / "checkpoints" / name)


def denoiser_of(folder, *, trained=("unet",), embedded=False, **more):
    found = loading.load(str(folder), print)
    for name, one in found.modules().items():
        one.eval().requires_grad_(name in trained)
    found.freeze_unused()
    return Denoiser(found, Noise(found.scheduler, "epsilon", None), embedded=embedded, **more), found


def bare(folder, settings, steps, trained):
    """A training loop as one writes it with diffusers: its pipeline's embeddings and sizes, its scheduler, fused AdamW."""
    pipe = StableDiffusionXLPipeline.from_pretrained(folder)
    schedule = DDPMScheduler.from_config(pipe.scheduler.config)
    data = pictures.load(settings)
    (rows, _), chosen = RECIPE.split(data, settings), settings.training
    modules = [getattr(pipe, name) for name in trained]
    for one in (pipe.unet, pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        one.requires_grad_(one in modules).train(one in modules)
    weights = [one for module in modules for one in module.parameters()]
    groups = [
        {"params": [one for one in weights if one.ndim > 1], "weight_decay": chosen.weight_decay},
        {"params": [one for one in weights if one.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=chosen.learning_rate, fused=True), []
    side = batches.Table({}, torch.empty(len(rows)))
    side.apart = True
    torch.manual_seed(settings.run.seed)
    for mine in batches.epoch_order(side, chosen.batch_size, settings.run.seed, 0)[:steps]:
        pixels = data.pixels(rows[mine])
        with torch.no_grad():
            clean = pipe.vae.encode(pixels).latent_dist.sample() * pipe.vae.config.scaling_factor
        captions = [data.captions[row] for row in rows[mine].tolist()]
        embeddings, _, pooled, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False)
        time_ids = pipe._get_add_time_ids((8, 8), (0, 0), (16, 16), torch.float32, 12).repeat(len(mine), 1)
        noise, times = torch.randn_like(clean), torch.randint(1000, (len(mine),))
        noisy = schedule.add_noise(clean, noise, times)
        told = {"text_embeds": pooled, "time_ids": time_ids}
        predicted = pipe.unet(noisy, times, embeddings, added_cond_kwargs=told).sample
        v = schedule.config.prediction_type == "v_prediction"
        loss = torch.nn.functional.mse_loss(predicted, schedule.get_velocity(clean, noise, times) if v else noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, chosen.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("prediction", "trained"),
    [("epsilon", ()), ("v_prediction", ()), ("epsilon", TEXTS[:1]), ("epsilon", TEXTS[1:]), ("v_prediction", TEXTS)],
)
def test_its_losses_are_those_of_a_bare_loop_of_diffusers_bit_for_bit(tmp_path, train, prediction, trained):
    model = write(tmp_path / "model", prediction)
    settings = [
        "diffusion.cache=false", "diffusion.caption_dropout=0", "diffusion.min_snr_gamma=null",
        "training.schedule=constant", "training.warmup_fraction=0", *(f"diffusion.train_{one}=true" for one in trained),
    ]  # fmt: skip
    train(*settings, model=model)
    ours = [one["loss"] for one in record.load(tmp_path / "run")["steps"]]
    asked = configure.load([*sdxl(model), *settings])
    assert ours == bare(model, asked, 3, ("unet", *trained))
    assert len(set(ours)) == 3


@pytest.mark.campaign
def test_the_pipeline_it_leaves_is_loaded_by_diffusers_and_draws_what_the_run_drew(tmp_path, train):
    outcome = train("diffusion.output=true", "diffusion.train_text_encoder_2=true", "diffusion.caption_dropout=0.5")
    pipe = StableDiffusionXLPipeline.from_pretrained(tmp_path / "run" / "pipeline", use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    kept = load(tmp_path / "run")
    weights = kept["model"]["model"]
    assert {name.partition(".")[0] for name in weights} == {"unet", "text_encoder_2"}, "the folder has what is frozen"
    for name in ("unet", "text_encoder_2"):
        theirs = getattr(pipe, name).state_dict()
        assert all(torch.equal(one, weights[f"{name}.{key}"]) for key, one in theirs.items())
    assert pipe.config.force_zeros_for_empty_prompt
    sampler = Sampler(
        networks=loading.load(str(tmp_path / "run" / "pipeline"), print), prediction="epsilon",
        prompts=("a digit", "a handwritten three"), size=(16, 16), steps=3, guidance=3.0, batch=4, seed=0,
    )  # fmt: skip
    asked = {"num_inference_steps": 3, "height": 16, "width": 16, "output_type": "pt", "guidance_scale": 3.0}
    theirs = pipe("a handwritten three", generator=torch.Generator().manual_seed(1), **asked).images
    torch.testing.assert_close(sampler.make(1)[1:], theirs * 2 - 1, rtol=1e-4, atol=1e-4)
    best = load(tmp_path / "run", "best.pt")
    judged = RECIPE.evaluate(configure.from_dict(best["settings"]), checkpoint.weights(best))
    assert judged == pytest.approx(outcome.best, rel=1e-6)


@pytest.mark.campaign
def test_adapters_of_all_three_networks_are_what_diffusers_loads(tmp_path, train, folder):
    texts = [f"diffusion.train_{name}=true" for name in TEXTS]
    train("diffusion.lora_rank=2", "diffusion.lora_alpha=4", "diffusion.output=true", *texts)
    kept = load(tmp_path / "run")["model"]["model"]
    assert all("lora" in name for name in kept)
    assert {name.partition(".")[0] for name in kept} == {"unet", *TEXTS}
    pipe = StableDiffusionXLPipeline.from_pretrained(folder, use_safetensors=True)
    pipe.load_lora_weights(tmp_path / "run" / "lora")
    for name in ("unet", *TEXTS):
        theirs = {key.replace("default_0", "default"): one for key, one in getattr(pipe, name).state_dict().items()}
        ours = {key.removeprefix(f"{name}."): one for key, one in kept.items() if key.startswith(f"{name}.")}
        assert all(torch.equal(one, theirs[key]) for key, one in ours.items())
        assert any(bool(one.any()) for key, one in ours.items() if "lora_B" in key), f"{name}'s were trained"


def test_a_batch_has_the_embeddings_of_the_pipeline_and_the_sizes_of_its_pictures(tmp_path, folder):
    settings = configure.load(sdxl(folder))
    data = pictures.load(settings)
    rows = RECIPE.split(data, settings)
    found, cache = RECIPE.load_networks(settings, data, print), Cache(tmp_path, torch.device("cpu"), 8, print)
    taken = RECIPE.make(settings, found, data, rows, cache=cache, weights=None).train.take(torch.arange(3))
    pipe = StableDiffusionXLPipeline.from_pretrained(folder)
    captions = [data.captions[row] for row in taken.labels.tolist()]
    embeddings, _, pooled, _ = pipe.encode_prompt(captions, do_classifier_free_guidance=False)
    torch.testing.assert_close(taken.inputs["embeddings"], embeddings)
    torch.testing.assert_close(taken.inputs["pooled"], pooled)
    assert taken.inputs["time_ids"].tolist() == [[8, 8, 0, 0, 16, 16]] * 3


@pytest.mark.parametrize("embedded", [True, False])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_caption_that_is_left_out_is_what_the_pipeline_takes_for_none(tmp_path, zeros, embedded):
    model = write(tmp_path / "model", zeros=zeros)
    denoiser, found = denoiser_of(model, embedded=embedded, caption_dropout=0.5)
    given = found.token_ids(["a digit"] * 64)
    given, seen = denoiser.embed(given) if embedded else given, []
    denoiser.unet.register_forward_pre_hook(lambda _, args, more: seen.append((args[2], more)), with_kwargs=True)
    latents = torch.zeros(64, 4, 8, 8)
    denoiser(mean=latents, logvar=latents, time_ids=torch.ones(64, 6), **given)
    pipe = StableDiffusionXLPipeline.from_pretrained(model)
    asked, nothing, pooled, none = pipe.encode_prompt("a digit", do_classifier_free_guidance=True)
    ((embeddings, more),) = seen
    for found_ones, kept, left_out in (
        (embeddings, asked, nothing), (more["added_cond_kwargs"]["text_embeds"], pooled, none)
    ):  # fmt: skip
        alike = [[torch.allclose(one, which[0], atol=1e-6) for one in found_ones] for which in (kept, left_out)]
        assert all(a != b for a, b in zip(*alike, strict=True))
        assert 16 < sum(alike[1]) < 48


def test_gradients_reach_the_encoders_that_are_trained_and_no_layer_that_is_not_used(folder):
    for trained in (("unet",), ("unet", "text_encoder"), ("unet", "text_encoder_2"), ("unet", *TEXTS)):
        denoiser, found = denoiser_of(folder, trained=trained)
        latents = torch.ones(2, 4, 8, 8)
        error = denoiser(mean=latents, logvar=latents, time_ids=torch.ones(2, 6), **found.token_ids(["a", "b"]))
        mean_square(error, error).backward()
        for name, one in found.modules().items():
            asked = [p for p in one.parameters() if p.requires_grad]
            assert bool(asked) == (name in trained)
            assert all(p.grad is not None for p in asked)
            assert name not in denoiser.encoders or one.training == (name in trained)


ON = ["training.optimization.use_torch_compile=true", "compile.preset=aot_eager", "compile.measure_eager_steps=0"]
NAMES = ("unet", *TEXTS, "vae")


@pytest.mark.campaign
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some_of(2)
def test_each_component_is_switched_on_its_own(train, name):
    """Encoders run in each step here, the second one with gradients."""
    off = [f"compile.components.{one}.{mode}=none" for one in NAMES for mode in ("training", "inference")]
    trains = name in ("unet", "text_encoder_2")
    off.remove("compile.components.text_encoder.training=none")  # says nothing of an encoder that is not trained
    on = f"compile.components.{name}.{'training' if trains else 'inference'}=aot_eager"
    outcome = train(
        *ON, *(one for one in off if one.partition("=")[0] != on.partition("=")[0]), on, "diffusion.cache=false",
        "diffusion.train_text_encoder_2=true", "training.max_steps=2",
    )  # fmt: skip
    states = {one: told["state"] for one, told in outcome.components.items()}
    assert states == {one: "compiled" if one == name else "eager" for one in (*NAMES, "loss")}
    told = outcome.components[name]
    assert (told["graph_breaks"], told["recompiles"]) == (0, 0)


@pytest.mark.campaign
@pytest.mark.parametrize("texts", [(), TEXTS])
def test_a_captured_step_of_an_sdxl_trains_as_eager_does(folder, texts):
    """The noise, the captions that are left out, and both encoders where they train, are in the recording."""
    trained = ("unet", *texts)
    denoiser, found = denoiser_of(folder, trained=trained, embedded=not texts, caption_dropout=0.3)
    eager, ids = copy.deepcopy(denoiser), found.token_ids(["a digit", "three", "five", "six"])
    given = {"logvar": torch.full((4, 4, 8, 8), -3.0), **(ids if texts else denoiser.embed(ids))}
    generator = torch.Generator().manual_seed(0)
    steps = [{"mean": torch.randn(4, 4, 8, 8, generator=generator), **given} for _ in range(12)]
    for one in steps:
        one["time_ids"] = 100 * torch.rand(4, 6, generator=generator)

    def update(model, optimizer, batch):
        loss = mean_square(model(**batch), None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first, second = (
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.01) for one in (denoiser, eager)
    )
    torch.manual_seed(1)
    theirs = [update(eager, second, batch) for batch in steps]
    torch.manual_seed(1)
    models = {name: found.modules()[name] for name in trained}
    with captured_step_emulation(), hotloop.Loop(models, first, state=denoiser, run="eager+graph") as loop:
        run = loop.step(lambda batch: update(denoiser, first, batch))
        ours = [run(batch) for batch in steps]
        assert loop.status().tier == "eager+graph", loop.status().decisions
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    for one, other in zip(denoiser.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def without(part):
    def change(folder):
        shutil.rmtree(folder / part)

    return change


def indexed(**changed):
    def change(folder):
        file = folder / "model_index.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


def configured(part, **changed):
    def change(folder):
        file = folder / part / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return change


def unprojected(folder):
    made = parts()
    CLIPTextModel(made["text_encoder_2"].config).save_pretrained(folder / "text_encoder_2")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("tokenizer_2"), "cannot be loaded"),
        (without("text_encoder_2"), "cannot be loaded"),
        (indexed(_class_name="StableDiffusionXLImg2ImgPipeline"), "is a StableDiffusionXLImg2ImgPipeline; expected"),
        (unprojected, r"its text_encoder_2 has no weights for text_\S+ of a CLIPTextModelWith"),
        (configured("vae", latents_mean=[0.1] * 4, latents_std=[1.0] * 4), "a VAE with latents_mean"),
    ],
)
def test_a_folder_that_is_no_whole_sdxl_is_refused_before_anything_is_trained(tmp_path, train, folder, change, said):
    changed = tmp_path / "changed"
    shutil.copytree(folder, changed)
    change(changed)
    with pytest.raises(ConfigError, match=said):
        train(model=changed)
    assert not (tmp_path / "run").exists()
