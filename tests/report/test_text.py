import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0 s"), (8.5e-7, "0.85 µs"), (0.000850, "850 µs"), (0.01234, "12.3 ms"), (3.214, "3.21 s"), (59.9, "59.9 s"),
        (245, "4 min 05 s"), (3599.7, "60 min 00 s"), (7380, "2 h 03 min"), (360000, "100 h 00 min"),
    ],
)  # fmt: skip
def test_durations(value, shown):
    assert text.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (1000, "1,000 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB"), (2**60, "1,048,576 TiB")],
)
def test_sizes(value, shown):
    assert text.size(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.8912345, "0.8912"), (1234.5678, "1,235"), (3.2e-5, "3.20e-05"), (-0.5, "-0.5"), (2e12, "2.00e+12")],
)
def test_figures(value, shown):
    assert text.figure(value) == shown


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("peak_memory_bytes", 2**20, "1 MiB"),
        ("steady_step_ms", 12.34, "12.3 ms"),
        ("cold_seconds", 90, "1 min 30 s"),
        ("seconds_saved", 2.7, "2.7 s"),
        ("samples_per_second", 911.32, "911/s"),
        ("break_even_step", 410, "410"),
        ("cold_seconds", "nan", "nan"),
        ("anything", None, "\N{EN DASH}"),
        ("flag", True, "true"),
    ],
)
def test_measurements_are_shown_in_the_unit_of_their_name(key, value, shown):
    assert text.quantity(key, value) == shown


def test_labels_and_places():
    assert text.words("peak_memory_bytes") == "Peak memory"
    assert (text.words("seconds_saved"), text.words("seconds")) == ("Saved", "Seconds")
    assert text.place({"file": "a.py", "line": 3}) == "a.py:3"
    assert text.place({"file": "a.py", "line": None}) == "a.py"
    assert text.place({"file": None, "line": 3}) == ""
    assert text.short_place("/home/ana/src/model/a.py:3") == "…/model/a.py:3"
    assert text.short_place("src/a.py:3") == "src/a.py:3"
    assert text.count(1, "step") == "1 step"
    assert text.count(1200, "step") == "1,200 steps"
    assert text.moment("x") == text.moment(1e300) == ""


def test_steps_are_shown_in_full():
    assert [text.nth(each) for each in (0.0, 12.0, 1e6, 1e300)] == ["0", "12", "1,000,000", "1e+300"]


def test_nested_settings_become_dotted_keys():
    assert list(text.flat({"a": {"b": 1, "c": {}}, "d": [1]})) == [("a.b", 1), ("a.c", {}), ("d", [1])]


@given(st.text() | st.floats() | st.integers() | st.lists(st.text()))
def test_no_text_holds_what_harms_a_terminal(value):
    shown = text.line(value)
    assert "\x1b" not in shown
    assert "\n" not in shown
    assert len(shown) <= 300
    shown.encode()
