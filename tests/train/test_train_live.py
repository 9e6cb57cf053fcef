"""The view of a study: what it counts, and what it shows in a terminal and elsewhere."""

import io

import pytest
from rich.console import Console

from hotloop.train.live import Progress, View, duration


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def study():
    clock = Clock()
    progress = Progress("digits-lr", "accuracy", 10, 2, clock=clock)
    return progress, clock


def began(number, worker, **more):
    return {
        "kind": "TrialBegan",
        "number": number,
        "worker": worker,
        "attempt": 1,
        "values": {"training.learning_rate": 0.001, "kind": "[red]a"},
        **more,
    }


def ended(number, state="complete", value=0.5, cause=""):
    return {
        "kind": "TrialEnded",
        "number": number,
        "worker": 1,
        "state": state,
        "value": value,
        "cause": cause,
        "seconds": 1.0,
        "best": False,
    }


def drive(progress, clock, hear):
    """Four trials over and two running: complete 0.8 and 0.9, pruned, failed."""
    ends = [
        ended(0, value=0.8),
        ended(1, value=0.9),
        ended(2, "pruned", None, "median"),
        ended(3, "failed", None, "out of [memory]"),
    ]
    for number in range(4):
        hear(began(number, 1 + number % 2))
        clock.now += 60
        hear({"kind": "TrialReported", "number": number, "worker": 1, "step": 1, "value": 0.7})
        hear(ends[number])
    hear(began(4, 1))
    hear(began(5, 2, attempt=2))
    clock.now += 30


def test_progress_counts_what_is_over_what_is_best_and_what_is_left(study):
    progress, clock = study
    assert (progress.seconds_left, progress.trials_per_hour, progress.best) == (None, None, None)
    drive(progress, clock, progress.hear)
    assert (progress.done, [one.number for one in progress.running]) == (4, [4, 5])
    assert (progress.best.number, progress.best.value) == (1, 0.9)
    assert progress.trials_per_hour == pytest.approx(120)
    # Six are left, of a minute each, on two workers; the two that run are half done.
    assert progress.seconds_left == pytest.approx((6 * 60 - 2 * 30) / 2)
    assert progress.counts() == "2 complete, 1 pruned, 1 failed"


def test_less_is_better_where_the_study_says_so(study):
    progress, clock = study
    progress.maximize = False
    drive(progress, clock, progress.hear)
    assert progress.best.number == 0


def test_an_interrupted_trial_is_open_again_and_an_unknown_one_changes_nothing(study):
    progress, _ = study
    progress.hear(began(0, 1))
    progress.hear(ended(0, "interrupted", None))
    progress.hear(ended(7))
    progress.hear({"kind": "Said", "text": "hello"})
    assert (progress.done, progress.running) == (0, [])


def test_trials_of_an_earlier_command_count_as_over(study):
    progress, clock = study
    progress.earlier = 3
    drive(progress, clock, progress.hear)
    assert (
        progress.headline()
        == "digits-lr: 7 of 10 trials over (3 earlier, 2 complete, 1 pruned, 1 failed); 120 trials an hour, 60 s left"
    )


def test_a_terminal_shows_trials_best_workers_and_time_left(study):
    progress, clock = study
    console = Console(file=io.StringIO(), force_terminal=True, width=120, record=True)
    with View(progress, console) as view:
        drive(progress, clock, view.hear)
        view.hear({"kind": "Said", "text": "x"}, "storage is [back]")
    text = console.export_text()
    assert "digits-lr: 4 of 10 trials over" in text
    assert "150 s" not in text
    assert "2 min left" in text
    assert "best accuracy 0.9000 in trial 1" in text
    assert "running (again)" in text
    assert "out of [memory]" in text
    assert "[red]a" in text
    assert "storage is [back]" in text


def test_elsewhere_there_are_plain_lines(study):
    progress, clock = study
    out = io.StringIO()
    with View(progress, Console(file=out, force_terminal=False, width=80)) as view:
        drive(
            progress,
            clock,
            lambda event: view.hear(
                event, f"{event['kind']} [{event['number']}]" if event["kind"] != "TrialReported" else ""
            ),
        )
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert lines[:3] == [
        "TrialBegan [0]",
        "TrialEnded [0]",
        "digits-lr: 1 of 10 trials over (1 complete); 120 trials an hour, 4 min left",
    ]
    assert len(lines) == 4 * 3 + 2


@pytest.mark.parametrize(("seconds", "said"), [(42, "42 s"), (99.4, "99 s"), (420, "7 min"), (11100, "3 h 05 min")])
def test_durations_are_said_as_people_say_them(seconds, said):
    assert duration(seconds) == said


def test_a_search_that_goes_on_counts_what_is_over_already(study):
    progress, clock = study
    progress.hear({"kind": "SearchBegan", "total": 12, "over": 5})
    progress.hear(began(5, 1))
    clock.now += 10
    progress.hear(ended(5))
    assert progress.done == 6
    assert progress.headline().startswith("digits-lr: 6 of 12 trials over")


def test_the_best_of_an_earlier_command_is_the_best_until_there_is_a_better_one(study):
    progress, _ = study
    best = {"number": 3, "value": 0.9, "values": {"training.learning_rate": 0.001}}
    progress.hear({"kind": "SearchBegan", "total": 12, "over": 5, "best": best})
    assert progress.best_line() == "best accuracy 0.9000 in trial 3: learning_rate 0.001"
    for number, value in ((5, 0.8), (6, 0.95)):
        progress.hear(began(number, 1))
        progress.hear(ended(number, value=value))
        assert progress.best.value == max(0.9, value)
    assert progress.done == 7


def test_a_trial_whose_worker_died_runs_no_more_once_another_has_its_place(study):
    progress, _ = study
    progress.hear(began(0, 1))
    progress.hear(began(1, 2))
    progress.hear(began(2, 1))
    assert [(one.number, one.worker) for one in progress.running] == [(2, 1), (1, 2)]
    assert progress.done == 0
