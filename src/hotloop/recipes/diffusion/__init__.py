"""Teach a latent-diffusion model to draw what captions say: ``hotloop train recipe=diffusion``.

The default draws scikit-learn's digits with three small networks that begin with random weights: an autoencoder, which
is trained first, in a stage of its own; a text encoder, which stays as it is; and a UNet. ``diffusion.model`` names any
Stable Diffusion or SDXL instead, ``pictures`` any folder of captioned pictures.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from hotloop.errors import ConfigError, DataError
from hotloop.recipes.diffusion import autoencoder, encoded, loading, lora, networks, output, tokens
from hotloop.recipes.diffusion.denoiser import VOCABULARY, Denoiser, mean_square
from hotloop.recipes.diffusion.noise import Noise, Prediction
from hotloop.recipes.diffusion.pictures import load as load_pictures
from hotloop.recipes.diffusion.pictures.latents import Latents
from hotloop.recipes.diffusion.place import Place, told
from hotloop.recipes.diffusion.sampling import Sampler, prompts_of
from hotloop.recipes.diffusion.validation import Fixed, MeanError
from hotloop.train import checkpoint, compiling, environment
from hotloop.train import evaluate as evaluation
from hotloop.train.folds import Side, Sides, split_rows
from hotloop.train.goal import Goal
from hotloop.train.networks import count
from hotloop.train.recipe import on_devices
from hotloop.train.supervised import Supervised
from hotloop.train.task import Show

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    train: Latents
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
    pictures = load_pictures(settings, told("Pictures looked at", display.say))
    rows = split(pictures, settings)
    about = f"{pictures.describe()}; train {len(rows[0])}, validation {len(rows[1])}"
    for line in (*pictures.notes, f"Data: {about}"):
        display.say(line)

    # The networks: made here with random weights, or loaded.
    environment.seed(settings.run.seed)
    weights = start.resume["model"]["model"] if start.resume else None
    found = load_networks(settings, pictures, rows[0], weights, display.say)
    fingerprint = f"{digest(pictures, rows)} {found.fingerprint()}"
    start.check_data(fingerprint)
    # Described as it is before adapters are put into it: these are told by what is trained.
    model = [found.describe(), *networks.beyond(settings.diffusion.model, settings.pictures.size)]
    for line in model:
        display.say(f"Model: {line}")
    cut = found.cut(pictures.captions)
    long = [f"Captions that are longer than the model's {found.length} tokens, and are cut there: {cut}"] if cut else []
    for line in long:
        display.say(line)

    if "text_encoder_2" in compiling.plan(settings, COMPONENTS) and not found.xl:
        raise ConfigError(
            f"compile.components.text_encoder_2: diffusion.model={settings.diffusion.model} has one text encoder. "
            "Leave it out"
        )
    if start.dry:  # an autoencoder may be trained next, and latents are kept on disk
        return None

    # What trains, and what the networks that do not train make of pictures and captions, once.
    # One process makes it, and the others find it on the disk.
    place = Place(devices.fabric.device, start.folder, display.say)
    made = devices.ranks.after_first(lambda: make(settings, found, pictures, rows, place=place, weights=weights))
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
        show=show(settings, found, pictures, start.folder, display.say),
        told={
            "data": [about, *pictures.notes, *long],
            "model": [*model, trained],
            "samples": columns(settings, pictures),
        },
    )


def sides(settings: Settings) -> Sides:
    """Say what `train` learns from and is judged by: each picture is a group of its own, by its name."""
    pictures = load_pictures(settings)
    rows = split(pictures, settings)
    labels: Sequence[int | None] = pictures.labels or [None] * len(pictures)
    train_side, held_out = (
        Side(tuple(labels[row] for row in side.tolist()), tuple(pictures.names[row] for row in side.tolist()))
        for side in rows
    )
    return Sides(train_side, held_out, digest(pictures, rows))


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the pictures that were held out.

    Raises:
        ConfigError: the weights do not fit the model that the settings describe.
    """
    weights = weights["model"]
    pictures, device = load_pictures(settings), environment.device_of(settings.run)
    rows = split(pictures, settings)
    found = load_networks(settings, pictures, rows[0], weights, lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(device, Path(folder), lambda _: None)
        made = make(settings, found, pictures, rows, place=place, weights=weights)
        batch_size = settings.training.eval_batch_size
        return evaluation.evaluate(made.denoiser, MeanError(), made.validation, batch_size, device)


def split(pictures: Pictures, settings: Settings) -> tuple[Tensor, Tensor]:
    """Split the pictures, each a group of its own, so that classes and sizes are as frequent on both sides.

    Raises:
        DataError: a side has no picture.
    """
    fraction, seed = settings.data.validation_fraction, settings.run.seed
    strata: list[object] = list(zip(pictures.labels or [0] * len(pictures), pictures.bucket.tolist(), strict=True))
    if max(Counter(strata).values()) < (settings.kfold.n_splits or round(1 / fraction)):
        strata = [0] * len(pictures)  # a folder of few pictures: none of its sizes can be on both sides evenly
    both = split_rows(pictures.names, strata, fraction=fraction, seed=seed, kfold=settings.kfold)
    for name, side in zip(("training", "validation"), both, strict=True):
        if not side:
            raise DataError(f"the {name} side of {len(pictures)} pictures is empty: use more pictures")
    return torch.tensor(both[0]), torch.tensor(both[1])


def digest(pictures: Pictures, rows: tuple[Tensor, Tensor]) -> str:
    """Return a text that other pictures or captions, or the same split otherwise, would not have."""
    return hashlib.sha256(f"{pictures.fingerprint()} {[side.tolist() for side in rows]}".encode()).hexdigest()


def load_networks(
    settings: Settings,
    pictures: Pictures,
    rows: Tensor,
    weights: Mapping[str, Any] | None,
    say: Callable[[str], None],
) -> Networks:
    """Make or load the networks that the settings name, for the weights of a checkpoint or for new ones.

    ``rows`` are those whose captions may be known: networks that are made here learn their words, and with a
    checkpoint's weights go on with the words that it has, whatever the pictures are now.

    Raises:
        ConfigError: they cannot be loaded, or do not fit the pictures' sizes.
    """
    chosen = settings.diffusion

    def tokenizer() -> Any:
        if weights is not None and VOCABULARY in weights:
            return tokens.unpacked(weights[VOCABULARY])
        return tokens.learn([pictures.captions[row] for row in rows.tolist()])

    found = loading.load(chosen.model, tokenizer, (pictures.channels, settings.pictures.size), chosen.width, say)
    found.check(pictures.channels, pictures.sizes)
    if chosen.train_text_encoder_2 and not found.xl:
        raise ConfigError(
            f"diffusion.train_text_encoder_2=true: diffusion.model={chosen.model} has one text encoder. Leave it out, "
            "or name a StableDiffusionXLPipeline"
        )
    return found


def make(  # noqa: PLR0913 - what a model is made of
    settings: Settings,
    found: Networks,
    pictures: Pictures,
    rows: tuple[Tensor, Tensor],
    *,
    place: Place,
    weights: Mapping[str, Any] | None,
) -> Made:
    """Make what is trained and judged of networks and pictures.

    Args:
        settings: the run's.
        found: the networks; changed in place.
        pictures: all of them.
        rows: of both sides.
        place: where the networks run, and what they make is kept.
        weights: of a checkpoint, to go on with or to judge; what was made in its run is in it, the autoencoder too.
    """
    chosen, seed = settings.diffusion, settings.run.seed
    for one in found.modules().values():
        one.to(place.device).eval().requires_grad_(requires_grad=False)
    if found.name == networks.SMALL and weights is None:
        autoencoder.prepare(found.vae, pictures, rows[0], steps=chosen.autoencoder_steps, seed=seed, place=place)
    trained = trained_networks(settings)
    if chosen.lora_rank:
        lora.add(found, chosen.lora_rank, chosen.lora_alpha or chosen.lora_rank, trained)
    else:
        for name in trained:
            found.modules()[name].requires_grad_()
    found.freeze_unused()
    if chosen.gradient_checkpointing:
        found.unet.enable_gradient_checkpointing()

    noise = Noise(found.scheduler, prediction(settings, found), chosen.min_snr_gamma).to(place.device)
    once = chosen.cache and trained == ("unet",)
    denoiser = Denoiser(
        found, noise, embedded=once, caption_dropout=chosen.caption_dropout, noise_offset=chosen.noise_offset
    ).to(place.device)
    if weights is not None:
        adapters = f" with diffusion.lora_rank={'null' if chosen.lora_rank is None else chosen.lora_rank}"
        checkpoint.fit_weights(denoiser, weights, chosen.model + adapters, "diffusion.model")
        if found.name == networks.SMALL:  # of others the configuration has it, to more digits than a tensor
            found.vae.register_to_config(scaling_factor=float(denoiser.scale))

    batch_size = settings.training.eval_batch_size
    texts = encoded.of_captions(denoiser, found, pictures.captions, place.cache(batch_size) if once else None)
    sizes = encoded.told(found, pictures)
    if chosen.cache:
        moments = encoded.of_pictures(denoiser, pictures, place.cache(batch_size))
        train_side, held_out = (Latents(pictures, moments, texts, side, sizes) for side in rows)
    else:
        train_side, held_out = (encoded.Pixels(pictures, texts, side, sizes) for side in rows)
    return Made(denoiser, train_side, Fixed(held_out, denoiser.latent_shape, noise.steps, seed))


def trained_networks(settings: Settings) -> tuple[str, ...]:
    """Return the networks that are trained, or whose adapters are, by name."""
    chosen = settings.diffusion
    texts = {"text_encoder": chosen.train_text_encoder, "text_encoder_2": chosen.train_text_encoder_2}
    return ("unet", *(name for name, asked in texts.items() if asked))


def prediction(settings: Settings, found: Networks) -> Prediction:
    """Return what the UNet predicts: as asked for, else what the model was made for.

    Raises:
        ConfigError: a model that was made for something else.
    """
    own = settings.diffusion.prediction or found.scheduler.config.prediction_type
    if own not in ("epsilon", "v_prediction"):
        raise ConfigError(f"diffusion.model={found.name} predicts {own!r}: set diffusion.prediction to what to train")
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


def columns(settings: Settings, pictures: Pictures) -> list[str]:
    """Say what the columns of a sheet of samples show; nothing where none is made."""
    chosen = settings.diffusion
    prompts = prompts_of(chosen.prompts, pictures.prompts, pictures.captions)
    return [f"columns of a sheet: {'; '.join(prompts)}"] if chosen.output or chosen.sample_every else []


def show(settings: Settings, found: Networks, pictures: Pictures, folder: Path, say: Callable[[str], None]) -> Show:
    """Say what is made of the model now and then, and at the end: sheets of samples, and what other programs load."""
    chosen = settings.diffusion
    prompts = prompts_of(chosen.prompts, pictures.prompts, pictures.captions)
    sampler = Sampler(
        networks=found,
        prediction=prediction(settings, found),
        prompts=prompts,
        size=pictures.sizes[int(pictures.bucket.mode().values)],
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
        for one in output.write(found, sampler.prediction, folder, adapters=adapters):
            say(f"Written: {one}")
        return {}

    return Show(sheet, chosen.sample_every, end if chosen.output else None)
