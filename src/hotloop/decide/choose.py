"""The decision: which tier to prepare, try or switch to now, or none.

An option *pays* when what it is expected to save over the horizon, weighted by the chance that it works out, exceeds
its cost `PAYS` times over::

    value = chance * (step in force - step there) * (steps left - steps of the background compile) - cost

Runs that come after this one and share what is compiled add what each saves with it, less what capturing and proving
takes it again (`Option.again_seconds`). Of what is captured nothing is left to them.

Among those that pay, the greatest value is chosen. One exception, *cheap first*: an option whose whole preparation
takes at most `CHEAP` of the chosen one's goes before it (a captured eager step takes a second and gives most of what
there is on a launch-bound step; it also shows whether the step can be captured at all, and what it saves is credit
for the next), and so does one that pays while the chosen one is compiled in the background, which may take several
times as long as is expected. A preparation must fit in the credit at its worst (`guard`), and its expected cost in vain
in what is left for trials.

Hysteresis: a switch needs a saving of `MIN_GAIN` clear of noise (`trial`), a rejected tier comes back only when the
horizon has grown `REGROWN` times, and times of different moments are never compared (`speeds`): a tier that became
slow is timed beside the base tier, and only left when that is faster now.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop.decide import guard
from hotloop.decide.cases import PAYS, Case, Known, compare, known, numbers_of
from hotloop.decide.options import ASK_SECONDS, Action, Decision, Option, Standing, number
from hotloop.decide.trial import MIN_GAIN
from hotloop.decide.words import milliseconds, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

CHEAP = 0.1
"""An option that takes at most this share of the best one's preparation goes first."""

REGROWN = 4.0
"""A rejected tier is tried again when the horizon has grown this many times."""

SLOWED = 1.3
"""Steps that take so many times what they took are looked into: the base tier is timed beside them."""

EAGER_STEPS = 8
"""Steps to run eager before anything is decided: the first three warm up, the rest are timed."""

_FEWEST_TO_ASK = 20


def decide(standing: Standing, options: Sequence[Option]) -> Decision:
    """Say what to do at this step boundary.

    Args:
        standing: where the run stands.
        options: the tiers on offer besides the one in force, eager among them when another is in force. A tier that
            declined or failed is not offered.

    Returns:
        The decision. It never raises, whatever the figures are: what is no number is never chosen.
    """
    eager = number(standing.eager_seconds)
    step = number(standing.step_seconds) if standing.tier != standing.base else eager
    if not eager or not step:
        wait = max(1, EAGER_STEPS - max(0, standing.step))
        return Decision(
            action="stay",
            tier=standing.tier,
            reason=f"{standing.tier}: its step is not timed yet",
            numbers={"steps_done": standing.step},
            ask_again_in_steps=wait,
        )
    facts = known(standing, eager, step)
    if (ready := _ready(facts, options)) is not None:
        return ready
    if (check := _slowed(facts, options)) is not None:
        return check
    refused: list[str] = []
    cases = [compare(facts, option) for option in options if _eligible(facts, option, refused)]
    cases = [case for case in cases if case.pays]
    if standing.preparing is not None:
        cases = _meanwhile(facts, cases, options)
    cases = [case for case in cases if _allowed(facts, case, refused)]
    if not cases:
        return _stay(facts, refused, options)
    best = max(cases, key=lambda case: case.value)
    first = [case for case in cases if case.option.background_seconds is None and _goes_before(facts, case, best)]
    return _go(facts, max(first, key=lambda case: case.value) if first else best)


def _ready(facts: Known, options: Sequence[Option]) -> Decision | None:
    """Switch to the fastest of the tiers that a trial has just timed beside the one in force."""
    paired = [option for option in options if option.paired and option.usable and option.prepare_seconds == 0]
    paired = [option for option in paired if facts.step - option.step_seconds >= MIN_GAIN * facts.step]
    if not paired:
        return None
    best = min(paired, key=lambda option: option.step_seconds)
    here, there = milliseconds(facts.step), milliseconds(best.step_seconds)
    timed = _RECALLED if best.recalled else ", timed side by side"
    return Decision(
        action="switch",
        tier=best.tier,
        reason=f"{best.tier}: {there} a step against {here} in {facts.standing.tier}{timed}",
        numbers=numbers_of(facts, compare(facts, best)),
        ask_again_in_steps=_FEWEST_TO_ASK,
    )


def _slowed(facts: Known, options: Sequence[Option]) -> Decision | None:
    """Time the base tier beside one that became slow: is it the machine and the batches, or the tier?"""
    standing = facts.standing
    recent = number(standing.recent_seconds)
    back = [option for option in options if option.tier == standing.base and option.usable]
    if recent is None or not back or standing.tier == standing.base or recent < SLOWED * facts.step:
        return None
    if facts.trial_room <= 0 and recent <= facts.eager:
        return None
    here, was = milliseconds(recent), milliseconds(facts.step)
    return Decision(
        action="try",
        tier=standing.base,
        reason=f"{standing.base}: a step in {standing.tier} takes {here}, was {was}: timed side by side to see why",
        numbers=numbers_of(facts, compare(facts, back[0])) | {"recent_seconds": recent},
        ask_again_in_steps=_FEWEST_TO_ASK,
    )


def _eligible(facts: Known, option: Option, refused: list[str]) -> bool:
    standing = facts.standing
    if not option.usable or option.tier == standing.tier:
        return False
    if option.background_seconds is not None and standing.preparing is not None:
        return False
    if option.tier == standing.preparing:
        return False
    if option.rejected_at is not None and facts.horizon.steps < REGROWN * max(1, option.rejected_at):
        return False
    free, needed = standing.free_memory_bytes, option.memory_bytes
    if free is not None and needed is not None and needed > free:
        refused.append(f"{option.tier} needs {needed / 2**20:,.0f} MiB, {free / 2**20:,.0f} MiB are free")
        return False
    return facts.step - option.step_seconds >= MIN_GAIN * facts.step


def _meanwhile(facts: Known, cases: list[Case], options: Sequence[Option]) -> list[Case]:
    """Keep what goes before the background compile going on: anything else would be paid for twice."""
    coming = [compare(facts, option) for option in options if option.tier == facts.standing.preparing and option.usable]
    return [case for case in cases if any(_goes_before(facts, case, other) for other in coming)]


def _goes_before(facts: Known, case: Case, other: Case) -> bool:
    """Whether an option is cheap beside another, or pays until that one is compiled."""
    if case.effort <= CHEAP * other.effort:
        return True
    steps = min(case.steps, (other.option.background_seconds or 0.0) / facts.step)
    return dataclasses.replace(case, steps=steps, later=0.0).pays


def _allowed(facts: Known, case: Case, refused: list[str]) -> bool:
    """Whether the promise and the trials' share have room for the option."""
    option = case.option
    credit = facts.credit + guard.known_saving_seconds(option, facts.horizon, facts.step)
    worst = option.stake_seconds(guessed=facts.horizon.guessed)
    # Going back to what stands ready costs nothing, and must stay possible when nothing may be lost any more.
    if worst > max(0.0, credit):
        refused.append(
            f"{option.tier} would pay, but may cost {seconds(worst)} and only {seconds(max(0.0, credit))} may be lost"
        )
        return False
    if option.cost_seconds > 0 and (facts.trial_room <= 0 or guard.trial_cost_seconds(option) > facts.trial_room):
        room = f"{guard.TRIAL_SHARE:.0%} of the run, of which {seconds(max(0.0, facts.trial_room))} are left"
        refused.append(f"{option.tier} would pay, but trying it may be in vain, and trials may take {room}")
        return False
    return True


_RECALLED = " as timed in an earlier run of this process"
_EXPECTED = {"measured": "", "stored": " as in earlier runs", "prior": " as expected in general"}


def _go(facts: Known, case: Case) -> Decision:
    option = case.option
    action: Action = "try" if option.background_seconds is None else "prepare"
    cost = f"{seconds(case.cost)} to prepare and prove"
    if option.background_seconds is not None:
        cost = f"{seconds(option.background_seconds)} in the background, then {cost}"
    within = f"steps: {facts.horizon}{facts.horizon.shared}" if case.later else f"of the {facts.horizon}"
    expected = _RECALLED if option.recalled else _EXPECTED[option.source]
    reason = (
        f"{option.tier}: {cost}, saves {milliseconds(case.saving)} a step{expected}: "
        f"pays after {case.pays_after:,} {within}"
    )
    limit = facts.credit + guard.known_saving_seconds(option, facts.horizon, facts.step)
    if option.background_seconds is not None:
        alone = max(0.0, PAYS[option.source] * case.cost - option.chance * case.later)
        needed = alone / (option.chance * case.saving)
        limit = max(option.background_seconds, (facts.horizon.steps - needed) * facts.step)
    return Decision(
        action=action,
        tier=option.tier,
        reason=reason,
        numbers=numbers_of(facts, case),
        ask_again_in_steps=1 if action == "prepare" else _FEWEST_TO_ASK,
        limit_seconds=limit,
        more_seconds=min(guard.SLOWER_SECONDS, case.cost),
    )


def _stay(facts: Known, refused: list[str], options: Sequence[Option]) -> Decision:
    """Stay, and say why: what the promise refuses, else what comes nearest to paying."""
    standing = facts.standing
    nearest = None
    if refused:
        why = refused[0]
    elif standing.preparing is not None:
        why = f"{standing.preparing} is being prepared in the background"
    else:
        cases = [compare(facts, option) for option in options if _eligible(facts, option, [])]
        nearest = max(cases, key=lambda case: case.value, default=None)
        why = "nothing on offer is expected to be faster"
        if nearest is not None:
            why = (
                f"{nearest.option.tier} would save {milliseconds(nearest.saving)} a step for {seconds(nearest.cost)}, "
                f"not enough within the {facts.horizon}"
                f"{facts.horizon.shared if nearest.option.again_seconds is not None else ''}"
            )
    # Often enough to see a tier that became slower, seldom enough to cost nothing: every quarter of the run so far, at
    # most every five seconds.
    again = int(min(standing.step / 4, ASK_SECONDS / facts.step))
    return Decision(
        action="stay",
        tier=standing.tier,
        reason=f"{standing.tier} stays ({milliseconds(facts.step)} a step): {why}",
        numbers=numbers_of(facts, nearest),
        ask_again_in_steps=max(_FEWEST_TO_ASK, again),
    )
