"""What needs no training, judged on the same validation pairs: a metric means little without something to beat."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hotloop.train.evaluate import auc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.recipes.criteria.encoder import Loaded
    from hotloop.recipes.criteria.pairs import Pair

CHEAP = 10**12
"""Parameters times tokens up to which an encoder's own similarity is measured: about 10 s on two cores."""
BATCH = 64
_NAMES = {"baseline_overlap_auc": "word overlap", "baseline_cosine_auc": "cosine of the untrained encoder"}


def measure(pairs: Sequence[Pair], loaded: Loaded | None = None) -> dict[str, float]:
    """Return the AUC of what needs no training, by its name in the record.

    Args:
        pairs: those held out.
        loaded: an encoder that was not trained yet; its cosine is left out where it would take long, and for one that
            embeds no single texts, as a reranker.
    """
    labels = torch.tensor([pair.label for pair in pairs])
    found = {"baseline_overlap_auc": auc(torch.tensor([overlap(pair) for pair in pairs]), labels)}
    if loaded and loaded.embeds:
        scores = cosines(loaded, pairs)
        if scores is not None:
            found["baseline_cosine_auc"] = auc(scores, labels)
    return found


def describe(measured: Mapping[str, Any]) -> str:
    """Put the baselines among a record's measurements into words; empty where there are none."""
    known = [f"{words} {measured[name]:.4f}" for name, words in _NAMES.items() if name in measured]
    return f"AUC without training: {', '.join(known)}" if known else ""


def overlap(pair: Pair) -> float:
    """Return the share of both texts' distinct words that they have in common (Jaccard's index)."""
    first, second = (set(re.findall(r"\w+", text.lower())) for text in (pair.text, pair.criterion))
    return len(first & second) / max(1, len(first | second))


def cosines(loaded: Loaded, pairs: Sequence[Pair]) -> Tensor | None:
    """Return the cosine of both texts' mean token, shape (pairs,), each text alone; None where that would take long."""
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.text, pair.criterion)))
    texts.sort(key=len)  # texts of a length share a batch, and little of it is padding
    base = loaded.model.base
    lengths = loaded.tokenizer(texts, verbose=False)["input_ids"]
    layers = sum(one.numel() for one in base.parameters()) - sum(one.numel() for one in loaded.model.embeddings())
    if layers * sum(map(len, lengths)) > CHEAP:
        return None
    parts = []
    was_training = base.training
    base.eval()
    with torch.no_grad():
        for start in range(0, len(texts), BATCH):
            inputs = loaded.tokenizer(
                texts[start : start + BATCH], padding=True, truncation=True, max_length=loaded.longest,
                return_tensors="pt",
            )  # fmt: skip
            mask = inputs["attention_mask"].unsqueeze(-1)
            states = base(**inputs, return_dict=False)[0] * mask
            parts.append(functional.normalize(states.sum(dim=1) / mask.sum(dim=1), dim=-1))
    base.train(was_training)
    vectors, row = torch.cat(parts), {text: index for index, text in enumerate(texts)}
    first, second = ([row[text] for text in side] for side in zip(*((p.text, p.criterion) for p in pairs), strict=True))
    return (vectors[first] * vectors[second]).sum(dim=1)
