"""Parallel coordinates and the curves of the best trials, whatever is in a search's document."""

import pytest

from hotloop.report import page, parallel, study

SPACE = {"lr": {"kind": "log", "values": [1e-4, 1.0]}, "kind": {"kind": "choices", "values": ["a", "b"]}, "same": {}}


def trials(*found):
    return [
        {"number": at, "state": "complete", "value": value, "values": values}
        for at, (values, value) in enumerate(found)
    ]


def test_each_trial_is_a_line_over_the_settings_that_differ_the_best_last():
    ordered = trials(
        ({"lr": 1.0, "kind": "a", "same": 1}, 0.9),
        ({"lr": 1e-2, "kind": "b", "same": 1}, 0.8),
        ({"lr": 1e-4, "kind": "a", "same": 1}, 0.7),
    )
    drawn = parallel.build(ordered, SPACE, [*SPACE], "accuracy")
    assert [axis.name for axis in drawn.axes] == ["lr", "kind", "accuracy"]
    best, shade = drawn.lines[-1]
    heights = [float(point.split(",")[1]) for point in best.split()]
    assert heights == [drawn.top, drawn.bottom, drawn.top]
    assert shade == 0
    middle = [float(point.split(",")[1]) for point in drawn.lines[1][0].split()]
    assert middle[0] == pytest.approx((drawn.top + drawn.bottom) / 2)  # a logarithmic axis
    assert drawn.axes[0].labels[0][0] == "0.0001"


@pytest.mark.parametrize(
    ("ordered", "space"),
    [
        ([], {}), (trials(({"lr": 1.0}, 0.9)), SPACE), (trials(({}, 0.9), ({}, 0.8)), SPACE), (trials(({"lr": 1}, 1.0), ({"lr": 1}, 2.0)), SPACE),
    ],
)  # fmt: skip
def test_too_few_trials_or_settings_are_not_drawn(ordered, space):
    assert parallel.build(ordered, space, [*space], "m") is None


def test_values_of_any_type_are_drawn():
    odd = [{"lr": None}, {"lr": [1]}, {"lr": "<b>"}, {"lr": 10**400}, {}]
    drawn = parallel.build(trials(*((one, 0.5) for one in odd)), {"lr": []}, ["lr"], "m")
    assert len(drawn.lines) == 5


def a_document(**more):
    found = trials(({"lr": 1e-2}, 0.9), ({"lr": 1e-3}, 0.8), ({"lr": 1e-4}, 0.7))
    for one in found:
        one["reports"] = [[1, 0.1], [2, one["value"]], "odd", [3], [None, 1]]
    return {
        "schema": 1,
        "metric": "accuracy",
        "direction": "maximize",
        "space": SPACE,
        "trials": found,
        "best": 0,
        **more,
    }


def test_the_page_of_a_search_shows_how_its_best_trials_went():
    view = study.build(a_document())
    curves = next(chart for chart in view.charts if chart.key == "reports")
    assert curves.names == ["trial 0", "trial 1", "trial 2"]
    assert curves.columns[0] == [0.1, 0.9]
    text = page.render(view)
    assert text.count("<polyline") == 3
    assert "style=" not in text.split("<main>")[1].split("</main>")[0]  # the policy of the page would refuse it


def test_a_long_number_of_the_best_trial_is_short_in_its_card():
    found = trials(({"lr": 0.0004166165803092431}, 0.9))
    assert study.build({**a_document(), "trials": found}).best == (("lr", "0.0004166"),)
