"""What earlier runs of the same program found out about its tiers, and what this run adds."""

from __future__ import annotations

import linecache
import re
from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import CostStore, Key, TierCosts, key_of
from hotloop.compiling.apply import entry_points, holds_code_for
from hotloop.decide import Option, expect
from hotloop.step.policy import process_history
from hotloop.step.policy.process_history import ProgramHistory
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.decide import Facts, Speeds
    from hotloop.step.context import Context

_PROOF_STEPS = 4
_WORST_AGAIN = 2.0
"""How many times its expectation a known tier's preparation may take at worst; chosen, not measured."""
_SURVEY = "survey"
"""The name by which the store of costs keeps what surveys of a program cost; no tier is called so."""
_STOPPED = 2.0
"""How many times what was spent a survey is expected to cost that was stopped; chosen, not measured."""
_IN_VAIN_SHARE = 0.01
"""The share of a run that a survey may cost which an earlier run's makes expect to be in vain."""
_ASK_AGAIN = 4
"""Every so many runs a survey is made again that ended in a decline."""
_PLACE = re.compile(r" at (.+):(\d+): (.+)$")
"""The line in the text of an obstacle."""


def _is_new(name: str) -> bool:
    """Return whether each run pays for a tier anew, since nothing of it is kept."""
    return name.endswith("eager+graph") or parse(name).channels_last


class History:
    """The costs that are stored for one loop's program. Nothing is known before `look_up`.

    Attributes:
        program: what earlier runs in this process found out; the disk keeps what other processes did.
        timed_here: names of the tiers that this run has timed itself.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = CostStore()
        self._key: Key | None = None
        self._stored: Mapping[str, TierCosts] = {}
        self._left_alone = False
        self._code_held = False
        self.timed_here: set[str] = set()
        self.program = ProgramHistory()

    def look_up(self, step: Callable[..., Any], inputs: Any) -> None:
        """Look up the program by the arguments of its first call."""
        device = self._context.device
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        self._key = key_of(
            self._context.compiled.models.values(),
            inputs,
            optimizers=list(self._context.holdings.optimizers.values()),
            step=step,
            autocast=autocast,
            device=device,
        )
        self._stored = self._store.get(self._key) or {}
        self.program = process_history.program(self._key)

    def stored_option(self, name: str, facts: Facts, rejected_at: int | None) -> Option | None:
        """Return a tier with the costs that other processes stored; None where they did not, or declined it.

        The machine may be slower than it was then: the stored ratio to eager counts.
        """
        costs = self._stored.get(name)
        if costs is None or not costs.step_seconds or not costs.eager_seconds or costs.verdict != "proven":
            return None
        prepare = costs.warm_seconds if costs.warm_seconds is not None else costs.cold_seconds
        if prepare is None:
            return None
        eager = facts.eager_seconds
        expected = expect(name, facts)
        general = (expected.again_seconds or 0.0) if expected is not None else 0.0
        return Option(
            tier=name,
            step_seconds=eager * costs.step_seconds / costs.eager_seconds,
            prepare_seconds=prepare,
            prepare_worst_seconds=costs.cold_seconds,  # the cache may have been cleared since
            proof_seconds=_PROOF_STEPS * eager,
            again_seconds=None if _is_new(name) else min(prepare, general) + _PROOF_STEPS * eager,
            source="stored",
            rejected_at=rejected_at,
            by_steps=not parse(name).compiles,
        )

    def recalled_option(self, name: str, facts: Facts, rejected_at: int | None) -> Option | None:
        """Return a tier that an earlier run of this process timed beside eager: only its proof is missing.

        None where no run did, or where this process does not hold its code any more: then it costs what it costs new.
        """
        ratio = self.program.ratios.get(name)
        if ratio is None or (parse(name).compiles and not self._holds_code()):
            return None
        expected = expect(name, facts)
        known = self.program.again_seconds.get(name)
        if known is None and expected is not None:
            known = expected.again_seconds if expected.again_seconds is not None else expected.cost_seconds
        if known is None:  # a model that runs as it was given
            known = _PROOF_STEPS * facts.eager_seconds
        return Option(
            tier=name,
            step_seconds=facts.eager_seconds * ratio[0],
            step_worst_seconds=facts.eager_seconds * ratio[1],
            prepare_seconds=known,
            proof_seconds=_PROOF_STEPS * max(0.0, facts.eager_seconds * (1 - ratio[0])),  # the first steps save nothing
            recalled=name not in self.timed_here,
            prepare_worst_seconds=_WORST_AGAIN * known,
            again_seconds=None if _is_new(name) else known,
            source="measured",
            rejected_at=rejected_at,
        )

    def _holds_code(self) -> bool:
        """Return whether this process holds code for these models: the oldest is let go, a class made anew has none."""
        if not self._code_held:  # what the run's own models use is not let go any more
            models = self._context.compiled.models.values()
            self._code_held = any(holds_code_for(point) for model in models for point in entry_points(model))
        return self._code_held

    def note_trial(self, name: str, speeds: Speeds, prepare_seconds: float, *, faster: bool) -> None:
        """Note what a tier cost and saved, and whether it was faster than the tier in force.

        ``prepare_seconds`` go from the decision to the first proven step, beyond what plain steps would have taken.
        """
        step, eager = speeds.seconds(name), speeds.seconds(self._context.base_tier.name)
        self.timed_here.add(name)
        self.program.ratios, self.program.eager_seconds = speeds.known(), eager
        if faster:
            self.program.faster.add(name)
        else:
            self.program.faster.discard(name)
        if prepare_seconds > 0 and not parse(name).compiles:  # a later run takes as long
            self.program.again_seconds.setdefault(name, prepare_seconds)
        if step is None or eager is None or prepare_seconds <= 0:
            return
        warm = self._context.compiled.was_warm()
        costs = TierCosts(
            cold_seconds=None if warm else prepare_seconds,
            warm_seconds=prepare_seconds if warm else None,
            step_seconds=step,
            eager_seconds=eager,
            verdict="proven",
        )
        self._put(name, costs)

    def note_survey(self, seconds: float, reason: str) -> None:
        """Note what surveys of the step cost, and why they were in vain; no reason where one was stopped."""
        if seconds > 0:
            self._put(_SURVEY, TierCosts(cold_seconds=seconds, verdict="declined", reason=reason))

    def survey_seconds(self) -> float:
        """Return what surveys of this program cost in earlier runs; 0 where that is not known."""
        known = self._stored.get(_SURVEY)
        if known is None or known.cold_seconds is None:
            return 0.0
        return known.cold_seconds if known.reason else _STOPPED * known.cold_seconds

    def in_vain(self, name: str, run_seconds: float) -> str:
        """Return why to leave a tier alone that an earlier run's survey declined; empty where it may be tried.

        It may where the line that was to blame is another one now, where a survey costs nothing beside the run, and in
        every fourth run: what was to blame may be a switch that no key holds.
        """
        known, survey = self._stored.get(name), self._stored.get(_SURVEY)
        if known is None or survey is None or not survey.reason or known.reason != survey.reason:
            return ""
        place = _PLACE.search(survey.reason)
        if place is not None and linecache.getline(place[1], int(place[2])).strip() != place[3]:
            return ""
        if (seconds := self.survey_seconds()) <= _IN_VAIN_SHARE * run_seconds:
            return ""
        if survey.runs % _ASK_AGAIN == 0:
            return ""
        return (
            f"a survey of {seconds:.2f} s ended so in an earlier run: {known.reason}. It is looked at again in "
            f"every {_ASK_AGAIN}th run, once that line is another one, or in a run that takes a hundred times as long"
        )

    def note_left_alone(self) -> None:
        """Count a run that left a tier alone; its surveys cost nothing."""
        survey = self._stored.get(_SURVEY)
        if survey is not None and not self._left_alone:
            self._left_alone = True
            self._put(_SURVEY, TierCosts(verdict="declined", reason=survey.reason))

    def note_declined(self, name: str, reason: str) -> None:
        """Record that a tier was declined. A later run, which may differ, tries it again."""
        self.program.declines[name] += 1
        self._put(name, TierCosts(verdict="declined", reason=reason))

    def _put(self, name: str, costs: TierCosts) -> None:
        if self._key is not None:
            self._store.put(self._key, name, costs)
