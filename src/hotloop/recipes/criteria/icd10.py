"""The embedded data: ICD-10-CM's inclusion terms against its codes' descriptions (package simple-icd-10-cm, MIT)."""

from __future__ import annotations

import dataclasses
import functools
import random
import warnings
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from hotloop.recipes.criteria.pairs import Pair, Split
from hotloop.train.folds import remedy, sample, split_rows, where
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hotloop.train.settings import KfoldSettings


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """An inclusion term, the description of its code, and where both belong."""

    phrase: str
    description: str
    category: str
    chapter: str


@functools.cache
def terms() -> tuple[Term, ...]:
    """Read all inclusion terms: 12,552 of them in 1,447 categories, in the order of the classification."""
    with warnings.catch_warnings():
        # The package reads its own data with importlib's deprecated read_text while it is imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        icd = require("simple_icd_10_cm", "The embedded ICD-10-CM data", "demo")
    found: dict[tuple[str, str], Term] = {}
    for code in icd.get_all_codes(True):
        phrases = [] if icd.is_chapter_or_block(code) else icd.get_inclusion_term(code)
        for phrase in phrases:
            description = icd.get_description(code)
            term = Term(phrase, description, code.partition(".")[0], icd.get_ancestors(code)[-1])
            found.setdefault((phrase, description), term)
    return tuple(found.values())


def split(
    *,
    size: int | None,
    fraction: float,
    seed: int,
    negatives: Literal["chapter", "sibling"] = "chapter",
    kfold: KfoldSettings | None = None,
) -> Split:
    """Make pairs of a sample of the terms, half of them negative, and split them by category, once or into folds.

    The terms are split before negatives are drawn, each side from its own: so no category's descriptions are seen in
    training, not even as negatives, and met again in validation.

    Args:
        size: how many pairs; None makes two of every term.
        fraction: the share held out.
        seed: which sample, split and negatives.
        negatives: descriptions of another category of the same chapter, or of another code of the same category.
        kfold: the folds, in place of the share.

    Raises:
        DataError: the sample is too small to split.
    """
    drawn = sample(terms(), None if size is None else max(2, size // 2), seed)
    categories, chapters = [term.category for term in drawn], [term.chapter for term in drawn]
    sides = split_rows(categories, chapters, fraction=fraction, seed=seed, kfold=kfold)
    generator = random.Random(seed)  # noqa: S311 - a sample, no secret
    made = [_pairs([drawn[index] for index in side], negatives, generator) for side in sides]
    lost = sum(map(len, sides)) - sum(map(len, made)) // 2
    notes = [f"ICD-10-CM: {len(drawn)} inclusion terms, a {negatives} negative for each"]
    if lost:
        notes.append(f"{lost} terms left out: no other description to draw a {negatives} negative from on their side")
    return Split(tuple(made[0]), tuple(made[1]), tuple(notes)).checked(remedy(kfold), where(kfold))


def _pairs(side: Sequence[Term], negatives: str, generator: random.Random) -> list[Pair]:
    """Make a positive and a negative of each term that has a description to be set against."""
    by_chapter, by_category = _descriptions(side, "chapter"), _descriptions(side, "category")
    pairs = []
    for term in side:
        own = by_category[term.category]
        if negatives == "sibling":
            others = [one for one in own if one != term.description]
        else:
            others = [one for one in by_chapter[term.chapter] if one not in own]
        if others:
            pairs.append(Pair(term.phrase, term.description, 1, term.category))
            pairs.append(Pair(term.phrase, generator.choice(others), 0, term.category))
    return pairs


def _descriptions(side: Iterable[Term], by: Literal["chapter", "category"]) -> dict[str, dict[str, None]]:
    """Return the distinct descriptions of each chapter or category, in a stable order and quick to look up."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for term in side:
        found[getattr(term, by)][term.description] = None
    return found
