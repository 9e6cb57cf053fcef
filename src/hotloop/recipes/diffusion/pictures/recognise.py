"""How many made pictures show what they were to show: a simple classifier, trained on real ones, reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from hotloop.recipes.diffusion.pictures.loading import Pictures

HELD_OUT = 0.25
MOST = 8000
"""Pictures to train on and to be judged by: the time that a support vector machine takes grows with their square."""


def judge(images: Tensor, labels: Sequence[int], pictures: Pictures, seed: int) -> dict[str, float]:
    """Read pictures by scikit-learn's support vector machine, trained on real pictures of their one size.

    Args:
        images: of shape (images, channels, height, width) in -1..1, of the real ones' size; all numbers are finite.
        labels: what each is to show.
        pictures: real ones, with labels. Of many, `MOST` are drawn, and a quarter of these judges the machine itself.
        seed: which are drawn, and which are held out.

    Returns:
        ``recognised``, the share of images that show it, with Wilson's 95% interval and how many they were; the share
        of real ones that are read right, and what chance gives.
    """
    svm, stats = require("sklearn.svm", "Recognising samples"), require("scipy.stats", "Recognising samples")
    assert pictures.labels is not None
    order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(seed))[:MOST]
    real, truth = _flat(pictures.pixels(order)), [pictures.labels[row] for row in order.tolist()]
    held = max(1, round(HELD_OUT * len(order)))
    machine = svm.SVC().fit(real[held:], truth[held:])
    right = int((machine.predict(_flat(images)) == list(labels)).sum())
    low, high = stats.binomtest(right, len(labels)).proportion_ci(method="wilson")
    return {
        "recognised": right / len(labels), "recognised_low": low, "recognised_high": high,
        "recognised_of": len(labels), "recognised_real": float(machine.score(real[:held], truth[:held])),
        "recognised_chance": 1 / len(pictures.prompts),
    }  # fmt: skip


def _flat(images: Tensor) -> Any:
    return images.detach().float().cpu().clamp(-1, 1).flatten(1).numpy()
