"""Diagnosis: one rule a file, from the events and figures of a run to advice; pure, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.diagnose.capture_dropped import CaptureDropped
from hotloop.diagnose.case import Case
from hotloop.diagnose.checkpoint_outside import CheckpointOutside
from hotloop.diagnose.cold_cache import ColdCache
from hotloop.diagnose.container import Container
from hotloop.diagnose.cudagraphs_skipped import CudagraphsSkipped
from hotloop.diagnose.data_wait import DataWait
from hotloop.diagnose.disabled import Disabled
from hotloop.diagnose.fallback import Fallback
from hotloop.diagnose.frame_eager import FrameEager
from hotloop.diagnose.graph_break import GraphBreak
from hotloop.diagnose.host_sync import HostSync
from hotloop.diagnose.memory import Memory
from hotloop.diagnose.never_pays import NeverPays
from hotloop.diagnose.no_effect import NoEffect
from hotloop.diagnose.not_trained import NotTrained
from hotloop.diagnose.recompile import Recompile
from hotloop.diagnose.recompile_limit import RecompileLimit
from hotloop.diagnose.rule import Advice, Problem, Rule
from hotloop.diagnose.setting_switched import SettingSwitched
from hotloop.diagnose.slower_preset import SlowerPreset
from hotloop.diagnose.step_undone import StepUndone
from hotloop.diagnose.tier_declined import TierDeclined
from hotloop.remedies import REMEDIES, Remedy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CATALOGUE", "REMEDIES", "RULES", "Advice", "Case", "Problem", "Remedy", "Rule", "diagnose"]

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        NotTrained(),
        GraphBreak(),
        FrameEager(),
        Recompile(),
        RecompileLimit(),
        Fallback(),
        NoEffect(),
        Container(),
        Disabled(),
        SlowerPreset(),
        DataWait(),
        NeverPays(),
        ColdCache(),
        Memory(),
        CudagraphsSkipped(),
        CheckpointOutside(),
        SettingSwitched(),
        HostSync(),
        TierDeclined(),
        CaptureDropped(),
        StepUndone(),
    )
}
"""Every rule by name, in the order of the catalogue (``docs/reference/catalogue.md``)."""
CATALOGUE: tuple[Problem, ...] = tuple(problem for rule in RULES.values() for problem in rule.problems)
"""Everything that the rules can find, in the same order."""


def diagnose(document: Mapping[str, Any]) -> list[Advice]:
    """Return advice on one run, from its record's document: what costs most over the planned steps comes first."""
    case = Case.from_document(document)
    found = [advice for rule in RULES.values() for advice in rule.find(case)]
    return sorted(found, key=lambda advice: (-advice.lost_seconds(case.steps), -advice.nbytes, -advice.times))
