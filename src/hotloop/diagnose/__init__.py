"""Diagnosis: one table of rules, from the events and figures of a run to advice; pure, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.diagnose import breaks, host_sync, measured, observed, recompile
from hotloop.diagnose.case import Case
from hotloop.diagnose.rule import Advice, Problem, Rule
from hotloop.remedies import REMEDIES, Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CATALOGUE", "REMEDIES", "RULES", "Advice", "Case", "Problem", "Remedy", "Rule", "diagnose"]

_TABLE = (
    Rule((measured.NOT_TRAINED,), measured.find_not_trained),
    Rule(breaks.PROBLEMS, breaks.find),
    Rule((breaks.EAGER, breaks.RAISED), breaks.find_eager),
    Rule(recompile.PROBLEMS, recompile.find),
    Rule((recompile.LIMIT,), recompile.find_limits),
    Rule(observed.FALLBACKS, observed.find_fallbacks),
    Rule(observed.NO_EFFECT, observed.find_no_effect),
    Rule((observed.DISABLED,), observed.find_disabled),
    Rule((measured.SLOWER_PRESET,), measured.find_slower),
    Rule((measured.DATA_WAIT,), measured.find_data_wait),
    Rule((measured.NEVER_PAYS,), measured.find_never_pays),
    Rule((measured.COLD_CACHE,), measured.find_cold_cache),
    Rule((measured.MEMORY, measured.NEAR_LIMIT), measured.find_memory),
    Rule(tuple(observed.CUDAGRAPHS.values()), observed.find_cudagraphs_skipped),
    Rule((observed.CHECKPOINT_OUTSIDE,), observed.find_checkpoints_outside),
    Rule((observed.SETTING_SWITCHED,), observed.find_settings_switched),
    Rule((host_sync.PROBLEM,), host_sync.find),
    Rule((observed.TIER_DECLINED,), observed.find_declined),
    Rule((observed.CAPTURE_DROPPED,), observed.find_captures_dropped),
    Rule((observed.STEP_UNDONE,), observed.find_undone),
)
RULES: dict[str, Rule] = {rule.problems[0].rule: rule for rule in _TABLE}
"""Every rule by name, in the order of the catalogue (``docs/reference/catalogue.md``)."""
CATALOGUE: tuple[Problem, ...] = tuple(problem for rule in _TABLE for problem in rule.problems)
"""Everything that the rules can find, in the same order."""


def diagnose(document: Mapping[str, Any]) -> list[Advice]:
    """Return advice on one run, from its record's document: what costs most over the planned steps comes first."""
    case = Case.from_document(document)
    found = [advice for rule in _TABLE for advice in rule.find(case)]
    return sorted(found, key=lambda advice: (-advice.lost_seconds(case.steps), -advice.nbytes, -advice.times))
