"""When steps are checked: at 8, 16, 32, ... 4,096 steps, then for a share of the time, at random distances."""

from __future__ import annotations

import itertools

from hotloop.step.prove.schedule import SHARE, Schedule

_USUAL, _CHECK = 0.010, 0.030
"""Seconds of a step, and of a check beyond its step."""


def _checks(schedule: Schedule, steps: range, *, recorded: bool = True, check: float = _CHECK) -> list[int]:
    found = []
    for step in steps:
        if schedule.due(step):
            found.append(step)
            schedule.checked(check, _USUAL, recorded=recorded)
    return found


def test_a_recording_is_checked_at_doubling_distances_at_first() -> None:
    schedule = Schedule(SHARE)
    found = _checks(schedule, range(1, 1000), check=30.0)
    assert found == [8, 16, 32, 64, 128, 256, 512]
    schedule.begin()
    assert _checks(schedule, range(1000, 1040), check=30.0) == [1007, 1015, 1031]


def test_later_checks_take_their_share_of_the_time_at_random_distances() -> None:
    steps = 200_000
    found = _checks(Schedule(SHARE), range(1, steps + 1))
    late = [step for step in found if step > 4096]
    distances = {after - before for before, after in itertools.pairwise(late)}
    assert len(distances) > 50
    assert 0.7 < len(late) * _CHECK / ((steps - 4096) * _USUAL * SHARE) < 1.3
    assert _checks(Schedule(0.0), range(1, 20_000))[-1] == 4096


def test_early_checks_of_code_meet_each_of_twenty_calls() -> None:
    cheap = _checks(Schedule(SHARE), range(1, 200), recorded=False)
    assert {step % 20 for step in cheap} == set(range(20))
    assert len(_checks(Schedule(SHARE), range(1, 200), recorded=False, check=0.5)) <= 6


def test_what_was_far_off_is_watched_closely() -> None:
    schedule = Schedule(SHARE)
    schedule.closely()
    assert _checks(schedule, range(1, 100), check=30.0) == [*range(1, 25), 32, 64]


def test_the_last_step_and_a_step_that_is_asked_for_are_checked() -> None:
    schedule = Schedule(SHARE, total_steps=100)
    assert _checks(schedule, range(1, 101), check=30.0)[-2:] == [64, 100]
    schedule.soon()
    assert schedule.due(101)
    assert schedule.due(102)  # until it was made
    schedule.checked(30.0, _USUAL, recorded=True)
    assert not schedule.due(103)
