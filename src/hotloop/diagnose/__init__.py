"""Diagnosis: one rule a file, from the events and figures of a run to advice; pure, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.diagnose import (
    capture_dropped,
    checkpoint_outside,
    cold_cache,
    container,
    cudagraphs_skipped,
    disabled,
    eager_part,
    fallback,
    frame_eager,
    graph_break,
    host_bound,
    host_sync,
    memory,
    never_pays,
    no_effect,
    recompile,
    recompile_limit,
    setting_switched,
    slower_preset,
    slower_regions,
    step_undone,
    tier_declined,
)
from hotloop.diagnose.advice import Advice
from hotloop.diagnose.case import Case
from hotloop.diagnose.problem import Problem
from hotloop.remedies import REMEDIES, Remedy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

__all__ = ["CATALOGUE", "REMEDIES", "RULES", "Advice", "Case", "Problem", "Remedy", "diagnose"]

RULES: dict[str, Callable[[Case], Iterable[Advice]]] = {
    "graph_break": graph_break.find,
    "frame_eager": frame_eager.find,
    "recompile": recompile.find,
    "recompile_limit": recompile_limit.find,
    "fallback": fallback.find,
    "no_effect": no_effect.find,
    "container": container.find,
    "disabled": disabled.find,
    "slower_preset": slower_preset.find,
    "slower_regions": slower_regions.find,
    "never_pays": never_pays.find,
    "cold_cache": cold_cache.find,
    "memory": memory.find,
    "cudagraphs_skipped": cudagraphs_skipped.find,
    "eager_part": eager_part.find,
    "checkpoint_outside": checkpoint_outside.find,
    "setting_switched": setting_switched.find,
    "host_bound": host_bound.find,
    "host_sync": host_sync.find,
    "tier_declined": tier_declined.find,
    "capture_dropped": capture_dropped.find,
    "step_undone": step_undone.find,
}
"""Every rule by name; each takes a case and gives what it finds."""
CATALOGUE: tuple[Problem, ...] = (
    *graph_break.PROBLEMS,
    *frame_eager.PROBLEMS,
    *recompile.PROBLEMS,
    *recompile_limit.PROBLEMS,
    *fallback.PROBLEMS,
    *no_effect.PROBLEMS,
    *container.PROBLEMS,
    *disabled.PROBLEMS,
    *slower_preset.PROBLEMS,
    *slower_regions.PROBLEMS,
    *never_pays.PROBLEMS,
    *cold_cache.PROBLEMS,
    *memory.PROBLEMS,
    *cudagraphs_skipped.PROBLEMS,
    *eager_part.PROBLEMS,
    *checkpoint_outside.PROBLEMS,
    *setting_switched.PROBLEMS,
    *host_bound.PROBLEMS,
    *host_sync.PROBLEMS,
    *tier_declined.PROBLEMS,
    *capture_dropped.PROBLEMS,
    *step_undone.PROBLEMS,
)
"""What the rules can find, in the order of the catalogue (``docs/catalogue.md``)."""


def diagnose(document: Mapping[str, Any]) -> list[Advice]:
    """Give advice on one run, from its record's document: worst first, by what it costs over the steps planned."""
    case = Case.from_document(document)
    found = [advice for rule in RULES.values() for advice in rule(case)]
    return sorted(found, key=lambda one: (-one.lost_seconds(case.steps), -one.nbytes, -one.times))
