"""Fine-tune a cross-encoder to decide whether a clinical phrase meets a criterion: ``hotloop train recipe=criteria``.

By default MiniLM-L6, with its real weights, learns whether an inclusion term of ICD-10-CM belongs to a code's
description; any encoder and any CSV of pairs take their place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from hotloop.recipes.criteria import csv_pairs, encoder, icd10, tokenised
from hotloop.train import checkpoint, environment
from hotloop.train import evaluate as evaluation
from hotloop.train.export import Made
from hotloop.train.folds import Side, Sides
from hotloop.train.goal import Goal
from hotloop.train.networks import count
from hotloop.train.recipe import on_devices
from hotloop.train.supervised import Supervised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.recipes.criteria.pairs import Split
    from hotloop.train.display import Display
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Loss, Task

COMPONENTS = ("model", "loss")
"""What can be compiled: the encoder with its head, and the loss."""
GOAL = Goal("f1")
"""What says which validation is the best."""
BASELINE = "baseline_overlap_auc"
"""What a record has the AUC of word overlap under."""


@on_devices(*COMPONENTS)
def train(start: Start, display: Display, devices: Devices) -> Task:
    """Make the recipe's task. `on_devices` trains it, from the start or from where the run stopped.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: data that cannot be used.
    """
    settings = start.settings

    # The data: pairs, and a split that keeps each group on one side.
    split = load_pairs(settings)
    start.check_data(split.fingerprint())
    display.say("\n".join(["Data: " + split.describe(), *split.notes]))

    # The model. The seed comes first, for the new head.
    environment.seed(settings.run.seed)
    loaded = load_model(start, display)

    # What needs no training, to judge the result by: the share of words that both texts have in common.
    labels = torch.tensor([pair.label for pair in split.validation])
    overlaps = torch.tensor([pair.overlap() for pair in split.validation])
    context = {BASELINE: evaluation.auc(overlaps, labels)}
    display.say(baseline(context))

    # Batches of one shape (or of a few declared ones), so that compiled code is compiled once.
    lengths = choose_lengths(loaded, split, settings)
    display.say(f"Inputs: {lengths.note}")
    return Supervised(
        start,
        "criteria",
        devices,
        model=loaded.model,
        parts={"model": loaded.model.net, "loss": functional.binary_cross_entropy_with_logits},
        train=tokenised.Dataset(loaded.tokenizer, split.train, lengths),
        validation=tokenised.Dataset(loaded.tokenizer, split.validation, lengths),
        fingerprint=split.fingerprint(),
        judge=judge,
        goal=GOAL,
        rows="pairs",
        context=context,
        remarks=remarks,
        told={"data": [split.describe(), *split.notes], "inputs": [lengths.note]},
    )


def sides(settings: Settings) -> Sides:
    """Say what `train` learns from and is judged by: the labels and groups of both sides of the split."""
    split = load_pairs(settings)
    train, held_out = (
        Side(tuple(pair.label for pair in side), tuple(pair.group for pair in side))
        for side in (split.train, split.validation)
    )
    return Sides(train, held_out, split.fingerprint())


def evaluate(settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
    """Judge a checkpoint's weights on the validation side of the data that the settings name.

    Raises:
        ConfigError: the weights do not fit the model that the settings name.
    """
    split = load_pairs(settings)
    loaded = encoder.load(settings.model.name, weights=False)
    checkpoint.fit_weights(loaded.model, weights["model"], settings.model.name)
    device = environment.device_of(settings.run)
    held_out = tokenised.Dataset(loaded.tokenizer, split.validation, choose_lengths(loaded, split, settings))
    judged = judge(functional.binary_cross_entropy_with_logits)
    return evaluation.evaluate(loaded.model.to(device), judged, held_out, settings.training.eval_batch_size, device)


def made(settings: Settings, weights: dict[str, Any]) -> Made:
    """Make the encoder again with a checkpoint's weights, for `hotloop export`.

    Raises:
        ConfigError: the weights do not fit the model that the settings name.
    """
    loaded = encoder.load(settings.model.name, weights=False)
    checkpoint.fit_weights(loaded.model, weights["model"], settings.model.name)
    return Made({"model": loaded.model}, loaded.tokenizer)


def judge(loss: Loss) -> evaluation.Together:
    """Judge all pairs together: the loss, and accuracy, F1, precision, recall (at probability 0.5) and AUC."""
    return evaluation.Together(loss, evaluation.measure)


def remarks(best: Mapping[str, float], measured: Mapping[str, Any]) -> list[str]:
    """Say what needs no training, and how far chance alone moves the accuracy."""
    noise = evaluation.chance(best["accuracy"], measured["validation_pairs"], "pairs")
    return [baseline(measured), noise]


def baseline(measured: Mapping[str, Any]) -> str:
    """Put the baseline among a record's measurements into words."""
    return f"AUC without training: word overlap {measured[BASELINE]:.4f}"


def load_model(start: Start, display: Display) -> encoder.Loaded:
    """Load the encoder, freeze what the settings say, and tell how much of it is trained."""
    model = start.settings.model
    loaded = encoder.load(model.name, dropout=model.dropout, weights=start.resume is None, say=display.say)
    if start.settings.training.freeze_embeddings:
        loaded.model.freeze_embeddings()
    trained = sum(one.numel() for one in loaded.model.parameters() if one.requires_grad)
    display.say("\n".join([f"Model: {loaded.notes[0]}, {count(trained)} of them trained", *loaded.notes[1:]]))
    return loaded


def load_pairs(settings: Settings) -> Split:
    """Read and split the pairs that the settings name."""
    data, seed, kfold = settings.data, settings.run.seed, settings.kfold
    if data.source == "csv":
        return csv_pairs.split(data, seed, kfold)
    return icd10.split(
        size=data.sample_size, fraction=data.validation_fraction, seed=seed, negatives=data.negatives, kfold=kfold
    )


def choose_lengths(loaded: encoder.Loaded, split: Split, settings: Settings) -> tokenised.Lengths:
    """Choose what the pairs are padded to. Folds look at both of their sides, so that all have the same shapes."""
    model, folds = settings.model, settings.kfold.fold is not None
    pairs = (*split.train, *split.validation) if folds else split.train
    return tokenised.choose_lengths(loaded.tokenizer, pairs, model.max_length, model.buckets, loaded.longest)
