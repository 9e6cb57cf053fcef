import math

from hypothesis import given
from hypothesis import strategies as st

from hotloop.report.series import BANDS, Line, Steps, aligned


def line(values):
    return Line("a", tuple(map(float, range(len(values)))), tuple(values))


def test_a_step_that_was_run_again_after_a_resume_counts_once_and_as_it_was_last():
    steps = Steps.read([{"step": n, "loss": 1.0} for n in range(5)] + [{"step": n, "loss": 2.0} for n in range(3, 7)])
    assert steps.line("loss", "loss") == Line("loss", (0, 1, 2, 3, 4, 5, 6), (1, 1, 1, 2, 2, 2, 2))


def test_an_entry_without_a_number_counts_by_its_place():
    assert Steps.read([{"loss": 1.0}, {"step": None, "loss": 2.0}]).numbers == (0.0, 1.0)


def test_what_is_no_finite_number_is_left_out_and_found():
    steps = Steps.read([{"loss": value} for value in (1, "nan", None, True, "text", 10**400, math.inf, "-inf", 2)])
    assert steps.line("loss", "loss").values == (1.0, 2.0)
    assert steps.not_finite("loss") == [1.0, 6.0, 7.0]


def test_bands_are_the_stretches_that_ran_the_same_way():
    ran = ["eager", "eager", None, "inductor", "inductor"]
    bands = Steps.read([{"running": each} for each in ran]).bands()
    assert [(band.start, band.end, band.label) for band in bands] == [(0, 1, "eager"), (3, 4, "inductor")]


def test_a_run_that_flaps_gives_a_bounded_number_of_bands():
    bands = Steps.read([{"running": "ab"[n % 2]} for n in range(10_000)]).bands()
    assert 1 <= len(bands) <= BANDS
    assert (bands[0].start, bands[-1].end) == (0, 9999)


def test_thinning_keeps_spikes_and_ends():
    values = [1.0] * 1_000_000
    values[123_457], values[900_001] = 50.0, -3.0
    thinned = line(values).thinned(2000)
    assert len(thinned.values) <= 2000
    assert max(thinned.values) == 50.0
    assert min(thinned.values) == -3.0
    assert (thinned.steps[0], thinned.steps[-1]) == (0, 999_999)


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), points=st.integers(6, 60))
def test_thinning_gives_few_ascending_points_of_the_line_with_its_extremes(values, points):
    whole = line(values)
    thinned = whole.thinned(points)
    pairs = dict(zip(whole.steps, whole.values, strict=True))
    assert len(thinned.values) <= max(points, 2)
    assert list(thinned.steps) == sorted(set(thinned.steps))
    assert all(pairs[step] == value for step, value in zip(thinned.steps, thinned.values, strict=True))
    assert (min(thinned.values), max(thinned.values)) == (min(values), max(values))


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200))
def test_smoothing_stays_between_the_values_and_starts_at_the_first(values):
    smoothed = line(values).smoothed("smooth").values
    assert math.isclose(smoothed[0], values[0], rel_tol=1e-9, abs_tol=1e-300)
    slack = 1e-6 * max(1.0, *map(abs, values))
    assert all(min(values) - slack <= each <= max(values) + slack for each in smoothed)


def test_the_steady_value_is_the_median_of_the_later_half():
    assert line([9.0] * 50 + [1.0] * 49 + [80.0]).steady == 1.0
    assert line([1.0] * 7).steady is None


def test_lines_are_put_on_one_axis():
    axis, columns = aligned([Line.of("a", [(0, 1.0), (2, 3.0)]), Line.of("b", [(1, 5.0), (2, None)])])
    assert axis == [0, 1, 2]
    assert columns == [[1.0, None, 3.0], [None, 5.0, None]]
