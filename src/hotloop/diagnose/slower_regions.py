"""A preset was measured whole and by blocks, and the slower of the two is in use."""

from __future__ import annotations

from hotloop.diagnose.rule import Advice, Case, Found, Problem, Rule, number, overlap
from hotloop.diagnose.slower_preset import NOISE
from hotloop.diagnose.words import figure


class SlowerRegions(Rule):
    problems = (
        Problem(
            rule="slower_regions",
            symptom="the choice of regions makes a step slower",
            cause="each region is a call of its own, with its guards, and nothing is fused across its border",
            cost="the difference at every step; compiling by blocks costs fewer seconds",
            change='choose the faster regions, regions="whole" or regions="blocks", if the planned steps pay for it',
            remedy="regions",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per preset whose slower regions lose more than they save."""
        asked = case.settings.get("run")
        ways = case.measurements.get("ways")
        ways = ways if isinstance(ways, dict) else {}
        for blocks in ways:
            whole = blocks.removesuffix(" by blocks")
            if blocks != whole and (asked not in ways or asked in (blocks, whole)):
                advice = self.compared(case, blocks, whole)
                if advice is not None:
                    yield advice

    def compared(self, case: Case, blocks: str, whole: str) -> Advice | None:
        """Return advice if the slower regions cost more than they save; None also if the run uses the faster ones."""
        of_blocks, of_whole = (number(case.way(name).get("step_ms")) for name in (blocks, whole))
        if of_blocks is None or of_whole is None:
            return None
        slow, fast, regions = (blocks, whole, "whole") if of_blocks > of_whole else (whole, blocks, "blocks")
        took, best = max(of_blocks, of_whole), min(of_blocks, of_whole)
        if case.settings.get("run") == fast or took <= best * NOISE or overlap(case.way(slow), case.way(fast)):
            return None
        cold_fast, cold_slow = (number(case.way(name).get("cold_seconds")) or 0.0 for name in (fast, slow))
        if (took - best) * case.steps <= (cold_fast - cold_slow) * 1e3:  # the slower regions save compile time, once
            return None
        return self.problem().advice(
            f"{slow} takes {figure(took)} ms a step, {fast} {figure(best)} ms",
            milliseconds=took - best,
            change=f'compile with regions="{regions}"',
        )
