"""Teach a Stable Diffusion or SDXL to draw what captions say: ``hotloop train recipe=diffusion pictures.path=FOLDER``.

The UNet is trained, or adapters of it; the text encoders where settings say so. The VAE stays as it is.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from hotloop.errors import ConfigError, DataError
from hotloop.recipes.diffusion import encoded, loading, output, pictures
from hotloop.recipes.diffusion.denoiser import Denoiser, mean_square
from hotloop.recipes.diffusion.encoded import Cache, Side
from hotloop.recipes.diffusion.noise import Noise, Prediction
from hotloop.recipes.diffusion.sampling import Sampler, prompts_of
from hotloop.recipes.diffusion.validation import Fixed, MeanError
from hotloop.train import checkpoint, compiling, environment, folds
from hotloop.train import evaluate as evaluation
from hotloop.train.goal import Goal
from hotloop.train.networks import count
from hotloop.train.recipe import on_devices
from hotloop.train.supervised import Supervised
from hotloop.train.task import Show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.recipes.diffusion.networks import Networks
    from hotloop.recipes.diffusion.pictures import Pictures
    from hotloop.train.display import Display
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Task

COMPONENTS = ("unet", "text_encoder", "text_encoder_2", "vae", "loss")
"""What can be compiled: the networks (of the VAE what encodes; SDXL alone has a second text encoder), and the loss."""
GOAL = Goal("loss", maximize=False)
"""What says which validation is the best."""


class Made(NamedTuple):
    """A model on its device, and both sides of the data as it takes them."""

    denoiser: Denoiser
    train: Side
    validation: Fixed


@on_devices(*COMPONENTS)
def train(start: Start, display: Display, devices: Devices) -> Task | None:
    """Make the recipe's task. `on_devices` trains it, from the start or from where the run stopped.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: pictures that cannot be used, listed by name.
    """
    settings = start.settings

    # The pictures, each with its caption, and a split of them.
    found = pictures.load(settings)
    rows = split(found, settings)
    about = f"{found.describe()}; train {len(rows[0])}, validation {len(rows[1])}"
    for line in (*found.notes, f"Data: {about}"):
        display.say(line)

    # The networks, and the weights of them that a run is resumed with.
    environment.seed(settings.run.seed)
    weights = start.resume["model"]["model"] if start.resume else None
    networks = load_networks(settings, found, display.say)
    fingerprint = f"{digest(found, rows)} {networks.fingerprint()}"
    start.check_data(fingerprint)
    model = networks.describe()  # before adapters are put into it: these are told by what is trained
    display.say(f"Model: {model}")
    cut = networks.cut(found.captions)
    long = (
        [f"Captions that are longer than the model's {networks.length} tokens, and are cut there: {cut}"] if cut else []
    )
    for line in long:
        display.say(line)

    if "text_encoder_2" in compiling.plan(settings, COMPONENTS) and not networks.xl:
        raise ConfigError(
            f"compile.components.text_encoder_2: diffusion.model={settings.diffusion.model} has one text encoder. "
            "Leave it out"
        )
    if start.dry:  # latents are encoded next, and kept on disk
        return None

    # What trains, and what the networks that do not train make of pictures and captions, once.
    # One process makes it, and the others find it on the disk.
    cache = Cache(start.folder, devices.fabric.device, settings.training.eval_batch_size, display.say)
    made = devices.ranks.after_first(lambda: make(settings, networks, found, rows, cache=cache, weights=weights))
    trained = trains(made, settings)
    display.say(trained)

    return Supervised(
        start,
        "diffusion",
        devices,
        model=made.denoiser,
        parts={**made.denoiser.parts(), "loss": mean_square},
        train=made.train,
        validation=made.validation,
        fingerprint=fingerprint,
        judge=lambda _: MeanError(),
        goal=GOAL,
        rows="pictures",
        context={"validation_pictures": len(rows[1])},  # what is judged are several noises of each
        compiled=("unet",),
        show=show(settings, networks, found, start.folder, display.say),
        told={"data": [about, *found.notes, *long], "model": [model, trained], "samples": columns(settings, found)},
    )


def sides(settings: Settings) -> folds.Sides:
    """Say what `train` learns from and is judged by: each picture is a group of its own, by its name."""
    found = pictures.load(settings)
    rows = split(found, settings)
    names = [tuple(found.names[row] for row in side.tolist()) for side in rows]
    train_side, held_out = (folds.Side((None,) * len(side), side) for side in names)
    return folds.Sides(train_side, held_out, digest(found, rows))


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the pictures that were held out.

    Raises:
        ConfigError: the weights do not fit the model that the settings describe.
    """
    found, device = pictures.load(settings), environment.device_of(settings.run)
    rows, networks = split(found, settings), load_networks(settings, found, lambda _: None)
    batch_size = settings.training.eval_batch_size
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache(Path(folder), device, batch_size, lambda _: None)
        made = make(settings, networks, found, rows, cache=cache, weights=weights["model"])
        return evaluation.evaluate(made.denoiser, MeanError(), made.validation, batch_size, device)


def split(found: Pictures, settings: Settings) -> tuple[Tensor, Tensor]:
    """Split the pictures, each a group of its own, so that sizes are as frequent on both sides.

    Raises:
        DataError: a side has no picture.
    """
    fraction, seed = settings.data.validation_fraction, settings.run.seed
    strata = found.bucket.tolist()
    if int(found.bucket.bincount().max()) < (settings.kfold.n_splits or round(1 / fraction)):
        strata = [0] * len(found)  # a folder of few pictures: none of its sizes can be on both sides evenly
    both = folds.split_rows(found.names, strata, fraction=fraction, seed=seed, kfold=settings.kfold)
    for name, side in zip(("training", "validation"), both, strict=True):
        if not side:
            raise DataError(f"the {name} side of {len(found)} pictures is empty: use more pictures")
    return torch.tensor(both[0]), torch.tensor(both[1])


def digest(found: Pictures, rows: tuple[Tensor, Tensor]) -> str:
    """Return a text that other pictures or captions, or the same split otherwise, would not have."""
    return hashlib.sha256(f"{found.fingerprint()} {[side.tolist() for side in rows]}".encode()).hexdigest()


def load_networks(settings: Settings, found: Pictures, say: Callable[[str], None]) -> Networks:
    """Load the networks that the settings name.

    Raises:
        ConfigError: they cannot be loaded, or do not fit the pictures' sizes.
    """
    chosen = settings.diffusion
    networks = loading.load(chosen.model, say)
    networks.check(found.sizes)
    if chosen.train_text_encoder_2 and not networks.xl:
        raise ConfigError(
            f"diffusion.train_text_encoder_2=true: diffusion.model={chosen.model} has one text encoder. Leave it out, "
            "or name a StableDiffusionXLPipeline"
        )
    return networks


def make(  # noqa: PLR0913 - what a model is made of
    settings: Settings,
    networks: Networks,
    found: Pictures,
    rows: tuple[Tensor, Tensor],
    *,
    cache: Cache,
    weights: Mapping[str, Any] | None,
) -> Made:
    """Make what is trained and judged of networks, which are changed in place, and pictures.

    Args:
        settings: the run's.
        networks: what `load_networks` gave.
        found: the pictures, all of them.
        rows: of both sides.
        cache: where the networks run, and what they make is kept.
        weights: of a checkpoint, to go on with or to judge.
    """
    chosen = settings.diffusion
    for one in networks.modules().values():
        one.to(cache.device).eval().requires_grad_(requires_grad=False)
    trained = trained_networks(settings)
    if chosen.lora_rank:
        output.add_adapters(networks, chosen.lora_rank, chosen.lora_alpha or chosen.lora_rank, trained)
    else:
        for name in trained:
            networks.modules()[name].requires_grad_()
    networks.freeze_unused()
    if chosen.gradient_checkpointing:
        networks.unet.enable_gradient_checkpointing()

    noise = Noise(networks.scheduler, prediction(settings, networks), chosen.min_snr_gamma).to(cache.device)
    once = chosen.cache and trained == ("unet",)
    denoiser = Denoiser(
        networks, noise, embedded=once, caption_dropout=chosen.caption_dropout, noise_offset=chosen.noise_offset
    ).to(cache.device)
    if weights is not None:
        adapters = f" with diffusion.lora_rank={'null' if chosen.lora_rank is None else chosen.lora_rank}"
        checkpoint.fit_weights(denoiser, weights, chosen.model + adapters, "diffusion.model")

    texts = encoded.of_captions(denoiser, networks, found.captions, cache if once else None)
    moments = encoded.of_pictures(denoiser, found, cache) if chosen.cache else None
    told = encoded.told(networks, found)
    train_side, held_out = (Side(found, side, texts, moments, told) for side in rows)
    return Made(denoiser, train_side, Fixed(held_out, denoiser.latent_shape, noise.steps, settings.run.seed))


def trained_networks(settings: Settings) -> tuple[str, ...]:
    """Return the networks that are trained, or whose adapters are, by name."""
    chosen = settings.diffusion
    texts = {"text_encoder": chosen.train_text_encoder, "text_encoder_2": chosen.train_text_encoder_2}
    return ("unet", *(name for name, asked in texts.items() if asked))


def prediction(settings: Settings, networks: Networks) -> Prediction:
    """Return what the UNet predicts: as asked for, else what the model was made for.

    Raises:
        ConfigError: a model that was made for something else.
    """
    own = settings.diffusion.prediction or networks.scheduler.config.prediction_type
    if own not in ("epsilon", "v_prediction"):
        raise ConfigError(
            f"diffusion.model={networks.name} predicts {own!r}: set diffusion.prediction to what to train"
        )
    return cast("Prediction", own)


def trains(made: Made, settings: Settings) -> str:
    """Say what is trained, and how many pictures cannot be."""
    many = sum(one.numel() for one in made.denoiser.parameters() if one.requires_grad)
    adapters = f"adapters of rank {settings.diffusion.lora_rank} on " if settings.diffusion.lora_rank else ""
    what = f"{adapters}the {' and the '.join(trained_networks(settings))}".replace("unet", "UNet").replace("_", " ")
    together = settings.training.gradient_accumulation * settings.run.devices
    left = made.train.unfilled(settings.training.batch_size, together)
    return f"Trained: {what}, {count(many)} parameters, which predict {made.denoiser.noise.prediction}" + (
        f"; {left} pictures are of sizes that do not fill a step, and are not trained on" if left else ""
    )


def columns(settings: Settings, found: Pictures) -> list[str]:
    """Say what the columns of a sheet of samples show; nothing where none is made."""
    chosen = settings.diffusion
    prompts = prompts_of(chosen.prompts, found.captions)
    return [f"columns of a sheet: {'; '.join(prompts)}"] if chosen.output or chosen.sample_every else []


def show(settings: Settings, networks: Networks, found: Pictures, folder: Path, say: Callable[[str], None]) -> Show:
    """Say what is made of the model now and then, and at the end: sheets of samples, and what other programs load."""
    chosen = settings.diffusion
    sampler = Sampler(
        networks=networks,
        prediction=prediction(settings, networks),
        prompts=prompts_of(chosen.prompts, found.captions),
        size=found.sizes[int(found.bucket.mode().values)],
        steps=chosen.sample_steps,
        guidance=chosen.guidance,
        batch=settings.training.eval_batch_size,
        seed=settings.run.seed,
    )

    def sheet(step: int) -> dict[str, float]:
        sampler.sheet(folder, step, chosen.samples)
        return {}

    def end(step: int) -> dict[str, float]:
        sampler.sheet(folder, step, chosen.samples)
        adapters = trained_networks(settings) if chosen.lora_rank else ()
        say(f"Written: {output.write(networks, sampler.prediction, folder, adapters=adapters)}")
        return {}

    return Show(sheet, chosen.sample_every, end if chosen.output else None)
