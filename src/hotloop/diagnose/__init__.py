"""Diagnosis: one rule a file, from the events and figures of a run to advice; pure, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.diagnose.advice import Advice, Remedy
from hotloop.diagnose.case import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["RULES", "Advice", "Case", "Remedy", "diagnose"]

RULES: dict[str, Callable[[Case], Iterable[Advice]]] = {}
"""Every rule by name; each takes a case and gives what it finds."""


def diagnose(document: Mapping[str, Any]) -> list[Advice]:
    """Give advice on one run, from its record's document: worst first, by what it costs over the steps planned."""
    case = Case.from_document(document)
    found = [advice for rule in RULES.values() for advice in rule(case)]
    return sorted(found, key=lambda one: (-one.lost_seconds(case.steps), -one.nbytes, -one.times))
