"""Teach a small vision transformer to read handwritten digits: ``hotloop train recipe=digits``.

The images are scikit-learn's: 1,797 of 8 x 8 pixels with 17 levels of grey. The model begins with random weights.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.errors import DataError
from hotloop.train import batches, checkpoint, environment
from hotloop.train import evaluate as evaluation
from hotloop.train.export import Made
from hotloop.train.folds import Side, Sides, sample, split_rows
from hotloop.train.goal import Goal
from hotloop.train.networks import Logits, count
from hotloop.train.optional import require
from hotloop.train.recipe import on_devices
from hotloop.train.supervised import Supervised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.display import Display
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Loss, Task

COMPONENTS = ("model", "loss")
"""What can be compiled: the vision transformer, and the loss."""
GOAL = Goal("accuracy")
"""What says which validation is the best."""
CLASSES, PIXELS, BRIGHTEST = 10, 8, 16


class Images(NamedTuple):
    """Images, float32 of shape (images, 1, 8, 8) in -1 to 1, their digits, int64 of shape (images,), and sides."""

    pixels: Tensor
    digits: Tensor
    train: Tensor
    validation: Tensor

    def side(self, rows: Tensor) -> batches.Table:
        """Return one side of the split."""
        return batches.Table({"pixel_values": self.pixels[rows]}, self.digits[rows])

    def fingerprint(self) -> str:
        """Return a text that other images, or the same split otherwise, would not have."""
        digest = hashlib.sha256()
        for one in self:
            digest.update(one.contiguous().numpy().tobytes())
        return digest.hexdigest()


@on_devices(*COMPONENTS)
def train(start: Start, display: Display, devices: Devices) -> Task:
    """Make the recipe's task. `on_devices` trains it, from the start or from where the run stopped.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: too few images to learn or to judge by.
    """
    settings = start.settings

    # The data: images, and a split in which each digit is as frequent on both sides.
    images = load_images(settings)
    start.check_data(images.fingerprint())
    about = f"train {len(images.train)} images, validation {len(images.validation)}"
    display.say(f"Data: {about}")

    # The model, with random weights.
    environment.seed(settings.run.seed)
    model = make_model(settings)
    numbers = sum(one.numel() for one in model.parameters())
    display.say(f"Model: a vision transformer, {count(numbers)} parameters")

    # What needs no training, to judge the result by.
    context = {"baseline_neighbour_accuracy": nearest_neighbour(images)}
    display.say(baseline(context))

    return Supervised(
        start,
        "digits",
        devices,
        model=model,
        parts={"model": model.net, "loss": functional.cross_entropy},
        train=images.side(images.train),
        validation=images.side(images.validation),
        fingerprint=images.fingerprint(),
        judge=judge,
        goal=GOAL,
        rows="images",
        context=context,
        remarks=remarks,
        told={"data": [about]},
    )


def sides(settings: Settings) -> Sides:
    """Say what `train` learns from and is judged by: the digits on both sides; each image is a group of its own."""
    images = load_images(settings)
    train_side, held_out = (
        Side(tuple(images.digits[side].tolist()), tuple(map(str, side.tolist())))
        for side in (images.train, images.validation)
    )
    return Sides(train_side, held_out, images.fingerprint())


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the validation side of the images.

    Raises:
        ConfigError: the weights do not fit the model that the settings describe.
    """
    images, model = load_images(settings), make_model(settings)
    checkpoint.fit_weights(model, weights["model"], "digits")
    device = environment.device_of(settings.run)
    judged, held_out = judge(functional.cross_entropy), images.side(images.validation)
    return evaluation.evaluate(model.to(device), judged, held_out, settings.training.eval_batch_size, device)


def made(settings: Settings, weights: dict[str, Any]) -> Made:
    """Make the vision transformer again with a checkpoint's weights, for `hotloop export`."""
    model = make_model(settings)
    checkpoint.fit_weights(model, weights["model"], "digits")
    return Made({"model": model})


def load_images(settings: Settings) -> Images:
    """Read the images, and split them.

    Raises:
        DataError: a digit is missing on a side.
    """
    loaded = require("sklearn.datasets", "recipe=digits").load_digits()
    data, seed = settings.data, settings.run.seed
    rows = torch.tensor(sample(range(len(loaded.target)), data.sample_size, seed))
    # Pixels are counts of 0 to 16; the models of this family take -1 to 1.
    pixels = torch.from_numpy(loaded.images).float()[rows, None] * (2 / BRIGHTEST) - 1
    digits = torch.from_numpy(loaded.target).long()[rows]
    # Who wrote a digit is not told, so each image is a group of its own.
    groups = [str(row) for row in rows.tolist()]
    fraction = data.validation_fraction
    sides = split_rows(groups, digits.tolist(), fraction=fraction, seed=seed, kfold=settings.kfold)
    for name, side in zip(("training", "validation"), sides, strict=True):
        missing = sorted(set(range(CLASSES)) - set(digits[side].tolist()))
        if missing:
            raise DataError(
                f"the {name} side of the split has no image of {', '.join(map(str, missing))}: every digit is needed "
                "on both sides. Use a larger data.sample_size or data.validation_fraction"
            )
    return Images(pixels, digits, *(torch.tensor(side) for side in sides))


def make_model(settings: Settings) -> Logits:
    """Make the vision transformer, with random weights."""
    transformers, chosen = require("transformers", "recipe=digits", "demo"), settings.digits
    dropout = settings.model.dropout or 0.0
    config = transformers.ViTConfig(
        image_size=PIXELS,
        num_channels=1,
        patch_size=chosen.patch_size,
        hidden_size=chosen.hidden_size,
        intermediate_size=4 * chosen.hidden_size,
        num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        num_labels=CLASSES,
    )
    return Logits(transformers.ViTForImageClassification(config))


def nearest_neighbour(images: Images) -> float:
    """Return the accuracy of calling each image what the training image nearest to it, by its pixels, is."""
    pixels = images.pixels.flatten(1)
    nearest = torch.cdist(pixels[images.validation], pixels[images.train]).argmin(dim=1)
    right = images.digits[images.train][nearest] == images.digits[images.validation]
    return float(right.float().mean())


def baseline(measured: Mapping[str, Any]) -> str:
    """Put the baseline among a record's measurements into words."""
    return f"Accuracy without training: nearest neighbour {measured['baseline_neighbour_accuracy']:.4f}"


def remarks(best: Mapping[str, float], measured: Mapping[str, Any]) -> list[str]:
    """Say what needs no training, and how far chance alone moves the accuracy."""
    return [baseline(measured), evaluation.chance(best["accuracy"], measured["validation_images"], "images")]


def judge(loss: Loss) -> evaluation.Together:
    """Judge all images together: the loss, and the accuracy."""

    def metrics(logits: Tensor, digits: Tensor) -> dict[str, float]:
        return {"accuracy": float((logits.argmax(dim=1) == digits).float().mean())}

    return evaluation.Together(loss, metrics)
