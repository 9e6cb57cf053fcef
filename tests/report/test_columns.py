"""Numbers over steps, and values as text for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.report import text
from hotloop.report.series import BANDS, Line, Steps, aligned

DASH = "\N{EN DASH}"


def line(values):
    return Line("a", tuple(map(float, range(len(values)))), tuple(values))


def test_a_step_that_was_run_again_after_a_resume_counts_once_and_as_it_was_last():
    steps = Steps.read([{"step": n, "loss": 1.0} for n in range(5)] + [{"step": n, "loss": 2.0} for n in range(3, 7)])
    assert steps.line("loss", "loss") == Line("loss", (0, 1, 2, 3, 4, 5, 6), (1, 1, 1, 2, 2, 2, 2))
    assert Steps.read([{"loss": 1.0}, {"step": None, "loss": 2.0}]).numbers == (0.0, 1.0)


def test_what_is_no_finite_number_is_left_out_and_found():
    steps = Steps.read([{"loss": value} for value in (1, "nan", None, True, "text", 10**400, math.inf, "-inf", 2)])
    assert steps.line("loss", "loss").values == (1.0, 2.0)
    assert steps.not_finite("loss") == [1.0, 6.0, 7.0]


def test_bands_are_the_stretches_that_ran_the_same_way_and_few():
    ran = ["none", "none", None, "inductor", "inductor"]
    bands = Steps.read([{"running": each} for each in ran]).bands()
    assert [(band.start, band.end, band.label) for band in bands] == [(0, 1, "eager"), (3, 4, "inductor")]
    assert len(Steps.read([{"running": "ab"[n % 2]} for n in range(10_000)]).bands()) <= BANDS


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), points=st.integers(6, 60))
def test_thinning_gives_few_ascending_points_of_the_line_with_its_extremes(values, points):
    whole = line(values)
    thinned = whole.thinned(points)
    pairs = dict(zip(whole.steps, whole.values, strict=True))
    assert len(thinned.values) <= max(points, 2)
    assert list(thinned.steps) == sorted(set(thinned.steps))
    assert all(pairs[step] == value for step, value in zip(thinned.steps, thinned.values, strict=True))
    assert (min(thinned.values), max(thinned.values)) == (min(values), max(values))


def test_smoothed_and_steady_values_and_a_common_axis():
    smoothed = line([1.0] * 60 + [2.0]).smoothed("smooth").values
    assert (smoothed[0], 1.0 < smoothed[-1] < 2.0) == (1.0, True)
    assert line([9.0] * 50 + [1.0] * 49 + [80.0]).steady == 1.0
    assert line([1.0] * 7).steady is None
    axis, columns = aligned([Line.of("a", [(0, 1.0), (2, 3.0)]), Line.of("b", [(1, 5.0), (2, None)])])
    assert (axis, columns) == ([0, 1, 2], [[1.0, None, 3.0], [None, 5.0, None]])


SECONDS = {
    0.0: "0 s", 8.5e-7: "0.85 µs", 0.000850: "850 µs", 0.01234: "12.3 ms", 3.214: "3.21 s", 59.9: "59.9 s",
    245: "4 min 05 s", 3599.7: "60 min 00 s", 7380: "2 h 03 min", 360000: "100 h 00 min",
}  # fmt: skip
SIZES = {0: "0 B", 1000: "1,000 B", 1536: "1.5 KiB", 3 * 2**30: "3 GiB", 2**60: "1,048,576 TiB"}
FIGURES = {0: "0", 0.8912345: "0.8912", 1234.5678: "1,235", 3.2e-5: "3.20e-05", -0.5: "-0.5", 2e12: "2.00e+12"}
STEPS = {0.0: "0", 12.0: "12", 1e6: "1,000,000", 1e300: "1e+300"}


@pytest.mark.parametrize(
    ("show", "known"), [(text.seconds, SECONDS), (text.size, SIZES), (text.figure, FIGURES), (text.nth, STEPS)]
)
def test_numbers_are_shown_with_their_leading_digits(show, known):
    assert {value: show(value) for value in known} == known


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("peak_memory_bytes", 2**20, "1 MiB"),
        ("steady_step_ms", 12.34, "12.3 ms"),
        ("seconds_saved", 2.7, "2.7 s"),
        ("samples_per_second", 911.32, "911/s"),
        ("break_even_step", 410, "410"),
        ("cold_seconds", "nan", "nan"),
        ("anything", None, DASH),
        ("flag", True, "true"),
    ],
)
def test_measurements_are_shown_in_the_unit_of_their_name(key, value, shown):
    assert text.quantity(key, value) == shown


def test_labels_and_places():
    assert (text.words("peak_memory_bytes"), text.words("seconds_saved")) == ("Peak memory", "Saved")
    places = [text.place({"file": file, "line": at}) for file, at in (("a.py", 3), ("a.py", None), (None, 3))]
    assert places == ["a.py:3", "a.py", ""]
    assert text.short_place("/home/ana/src/model/a.py:3") == "…/model/a.py:3"
    assert (text.count(1, "step"), text.count(1200, "step")) == ("1 step", "1,200 steps")
    assert text.moment("x") == text.moment(1e300) == ""
    assert list(text.flat({"a": {"b": 1, "c": {}}, "d": [1]})) == [("a.b", 1), ("a.c", {}), ("d", [1])]


@given(st.text() | st.floats() | st.integers() | st.lists(st.text()))
def test_no_text_holds_what_harms_a_terminal(value):
    shown = text.line(value)
    assert "\x1b" not in shown
    assert "\n" not in shown
    assert len(shown) <= 300
    shown.encode()
