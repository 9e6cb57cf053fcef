"""The decision: which tier to prepare, try or switch to now, or none.

An option *pays* if what it is expected to save over the horizon, weighted by the chance that it works out, exceeds
its cost `PAYS` times over::

    value = chance * (step in force - step there) * (steps left - steps of the background compile) - cost

Later runs that share what is compiled add what each saves with it, less what capturing and proving it again takes
(`Option.again_seconds`). A capture itself is of no use to later runs.

Among the options that pay, the greatest value is chosen. One exception is *cheap first*: an option goes before the
chosen one if its whole preparation takes at most `CHEAP` of the chosen one's. A captured eager step, for example, takes
a second and saves most of what can be saved on a launch-bound step. It also shows whether the step can be captured at
all, and what it saves is credit for the next. An option goes first, too, if it pays while the chosen one is compiled in
the background, which may take several times as long as expected. The worst cost of a preparation must fit in the credit
(`guard`), and its expected cost in vain must fit in what is left for trials.

Hysteresis: a switch needs a saving of `MIN_GAIN` clear of noise (`trial`). A rejected tier comes back only when the
horizon has grown `REGROWN` times. Times of different moments are never compared (`speeds`): a tier that became slow is
timed beside the base tier, and only left if the base tier is faster now.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from hotloop.decide import guard
from hotloop.decide.cases import PAYS, Case, Known
from hotloop.decide.options import ASK_SECONDS, Decision, Option, Standing, number
from hotloop.decide.trial import MIN_GAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

CHEAP = 0.1
"""An option that takes at most this share of the best one's preparation goes first."""

REGROWN = 4.0
"""A rejected tier is tried again when the horizon has grown this many times."""

SLOWED = 1.3
"""When steps take this many times what they took, the base tier is timed beside them."""

EAGER_STEPS = 8
"""Steps to run eager before anything is decided: the first three warm up, the rest are timed."""

_FEWEST_TO_ASK = 20


def decide(standing: Standing, options: Sequence[Option]) -> Decision:
    """Return what to do at this step boundary.

    Args:
        standing: where the run stands.
        options: the tiers on offer besides the one in force, eager among them if another is in force. A tier that
            declined or failed is not offered.

    Returns:
        The decision. Nothing is raised, whatever the figures are: an option with a figure that is no number is never
        chosen.
    """
    eager = number(standing.eager_seconds)
    step = number(standing.step_seconds) if standing.tier != standing.base else eager
    if not eager or not step:
        return Decision(
            action="stay",
            tier=standing.tier,
            reason=f"{standing.tier}: its step is not timed yet",
            numbers={"steps_done": standing.step},
            ask_again_in_steps=max(1, EAGER_STEPS - max(0, standing.step)),
        )
    boundary = _Boundary(Known.of(standing, eager, step), options)
    return boundary.switch() or boundary.recheck() or boundary.begin() or boundary.stay()


class _Boundary:
    """One decision: each method returns it if it is the one to take, in the order of `decide`."""

    def __init__(self, known: Known, options: Sequence[Option]) -> None:
        self.known = known
        self.standing = known.standing
        self.options = options
        self.refusals: list[str] = []  # why the promise does not allow options that would pay

    def switch(self) -> Decision | None:
        """Switch to the fastest of the tiers that a trial has just timed beside the one in force."""
        paired = [
            option
            for option in self.options
            if option.paired and option.usable and option.prepare_seconds == 0 and self.is_faster(option)
        ]
        if not paired:
            return None
        best = min(paired, key=lambda option: option.step_seconds)
        here, there = milliseconds(self.known.step), milliseconds(best.step_seconds)
        timed = " as timed in an earlier run of this process" if best.recalled else ", timed side by side"
        return Decision(
            action="switch",
            tier=best.tier,
            reason=f"{best.tier}: {there} a step against {here} in {self.standing.tier}{timed}",
            numbers=self.known.numbers(self.known.compare(best)),
            ask_again_in_steps=_FEWEST_TO_ASK,
        )

    def recheck(self) -> Decision | None:
        """Time the base tier beside a tier that became slow: the cause may be the machine, the batches or the tier."""
        standing, known = self.standing, self.known
        recent = number(standing.recent_seconds)
        base = next((option for option in self.options if option.tier == standing.base and option.usable), None)
        if recent is None or base is None or standing.tier == standing.base or recent < SLOWED * known.step:
            return None
        if known.trial_room <= 0 and recent <= known.eager:
            return None
        here, was = milliseconds(recent), milliseconds(known.step)
        return Decision(
            action="try",
            tier=standing.base,
            reason=f"{standing.base}: a step in {standing.tier} takes {here}, was {was}: timed side by side to see why",
            numbers=known.numbers(known.compare(base)) | {"recent_seconds": recent},
            ask_again_in_steps=_FEWEST_TO_ASK,
        )

    def begin(self) -> Decision | None:
        """Begin to prepare the option that pays most, or a cheap one before it."""
        cases = [self.known.compare(option) for option in self.options if self.is_eligible(option)]
        cases = [case for case in cases if case.pays]
        if self.standing.preparing is not None:
            # Only what goes before the background compile that is under way: anything else would be paid for twice.
            coming = [option for option in self.options if option.tier == self.standing.preparing and option.usable]
            compiling = [self.known.compare(option) for option in coming]
            cases = [case for case in cases if any(self.goes_before(case, other) for other in compiling)]
        cases = [case for case in cases if self.is_allowed(case)]
        if not cases:
            return None
        best = max(cases, key=lambda case: case.value)
        first = [case for case in cases if case.option.background_seconds is None and self.goes_before(case, best)]
        return self.prepare(max(first, key=lambda case: case.value) if first else best)

    def is_faster(self, option: Option) -> bool:
        """Return whether an option saves enough of a step to be worth a switch."""
        return self.known.step - option.step_seconds >= MIN_GAIN * self.known.step

    def is_eligible(self, option: Option) -> bool:
        """Return whether an option can be prepared now: usable, not rejected, with the memory that it needs."""
        standing = self.standing
        if not option.usable or option.tier in (standing.tier, standing.preparing):
            return False
        if option.background_seconds is not None and standing.preparing is not None:
            return False
        if option.rejected_at is not None and self.known.horizon.steps < REGROWN * max(1, option.rejected_at):
            return False
        free, needed = standing.free_memory_bytes, option.memory_bytes
        if free is not None and needed is not None and needed > free:
            self.refusals.append(f"{option.tier} needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free")
            return False
        return self.is_faster(option)

    def goes_before(self, case: Case, other: Case) -> bool:
        """Return whether an option is cheap beside another, or pays until that one is compiled."""
        if case.effort <= CHEAP * other.effort:
            return True
        steps = min(case.steps, (other.option.background_seconds or 0.0) / self.known.step)
        return dataclasses.replace(case, steps=steps, later=0.0).pays

    def is_allowed(self, case: Case) -> bool:
        """Return whether the promise and the trials' share have room for an option."""
        option, room = case.option, self.known.trial_room
        credit = max(0.0, self.known.credit_for(option))
        worst = option.stake_seconds(guessed=self.known.horizon.guessed)
        # A tier that stands ready costs nothing: going back to it must stay possible when nothing may be lost any more.
        if worst > credit:
            refusal = f"{option.tier} would pay, but may cost {seconds(worst)} and only {seconds(credit)} may be lost"
            self.refusals.append(f"{refusal}, so that the run stays within {1 + guard.SLOWER_SHARE} x eager")
            return False
        in_vain = (1.0 - min(1.0, option.chance)) * option.cost_seconds
        if option.cost_seconds > 0 and (room <= 0 or in_vain > room):
            share = f"{guard.TRIAL_SHARE:.0%} of the run and {guard.SAVED_SHARE:.0%} of what it saves"
            share += f", of which {seconds(max(0.0, room))} are left"
            self.refusals.append(f"{option.tier} would pay, but trying it may be in vain, and trials may take {share}")
            return False
        return True

    def prepare(self, case: Case) -> Decision:
        """Return the decision to prepare an option, or to compile it in the background."""
        known, option, horizon = self.known, case.option, self.known.horizon
        cost = f"{seconds(case.cost)} to prepare and prove"
        limit = known.credit_for(option)
        if option.background_seconds is not None:
            cost = f"{seconds(option.background_seconds)} in the background, then {cost}"
            alone = max(0.0, PAYS[option.source] * case.cost - option.chance * case.later)
            needed = alone / (option.chance * case.saving)
            limit = max(option.background_seconds, (horizon.steps - needed) * known.step)
        within = f"steps: {horizon}{horizon.shared}" if case.later else f"of the {horizon}"
        by_source = {"measured": "", "stored": " as in earlier runs", "prior": " as expected in general"}
        expected = " as timed in an earlier run of this process" if option.recalled else by_source[option.source]
        return Decision(
            action="try" if option.background_seconds is None else "prepare",
            tier=option.tier,
            reason=f"{option.tier}: {cost}, saves {milliseconds(case.saving)} a step{expected}: "
            f"pays after {case.pays_after:,} {within}",
            numbers=known.numbers(case),
            ask_again_in_steps=_FEWEST_TO_ASK if option.background_seconds is None else 1,
            limit_seconds=limit,
        )

    def stay(self) -> Decision:
        """Stay, and say why: what the promise refuses, else which option comes nearest to paying."""
        standing, known = self.standing, self.known
        nearest = None
        if self.refusals:
            why = self.refusals[0]
        elif standing.preparing is not None:
            why = f"{standing.preparing} is being prepared in the background"
        else:
            cases = [known.compare(option) for option in self.options if self.is_eligible(option)]
            nearest = max(cases, key=lambda case: case.value, default=None)
            why = "nothing on offer is expected to be faster"
            if nearest is not None:
                shared = known.horizon.shared if nearest.option.again_seconds is not None else ""
                alone = f": {self.needed(nearest)}" if not nearest.later else ""
                why = (
                    f"{nearest.option.tier} would save {milliseconds(nearest.saving)} a step and takes "
                    f"{seconds(nearest.cost)} to prepare and prove, which does not pay within the "
                    f"{known.horizon}{shared}{alone}"
                )
        # Often enough to see a tier that became slower, seldom enough to cost nothing: every quarter of the run so far,
        # at most every five seconds.
        again = int(min(standing.step / 4, ASK_SECONDS / known.step))
        return Decision(
            action="stay",
            tier=standing.tier,
            reason=f"{standing.tier} stays ({milliseconds(known.step)} a step): {why}",
            numbers=known.numbers(nearest),
            ask_again_in_steps=max(_FEWEST_TO_ASK, again),
        )

    def needed(self, case: Case) -> str:
        """Say after how many steps an option breaks even, and from how many on it is tried, which the margin delays."""
        waited = math.ceil((case.option.background_seconds or 0.0) / self.known.step)
        even, tried = case.pays_after + waited, case.pays_from + waited
        later = f", and is tried from about {about(tried)} on, as its figures are estimates" if tried > even + 1 else ""
        return f"it breaks even after about {about(even)}{later}"


def about(count: int) -> str:
    """Return a number of steps that was estimated as text, rounded to two digits: ``390,000``."""
    return f"{int(float(f'{count:.2g}')):,}"


def seconds(value: float) -> str:
    """Return ``value``, in s, as text: two digits below 10 s, whole seconds above."""
    if value < 1:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"  # noqa: PLR2004 - a decimal does not matter beyond


def milliseconds(value: float) -> str:
    """Return ``value``, in s, as text in ms with three digits."""
    ms = value * 1e3
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"  # noqa: PLR2004
