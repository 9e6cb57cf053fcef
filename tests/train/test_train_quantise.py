"""What a search is told about settings of which each value is compiled anew."""

import dataclasses
import math
import re

import pytest

from hotloop.train import quantise


@dataclasses.dataclass(frozen=True)
class Searched:
    name: str
    kind: str
    values: tuple
    step: float | None = None

    def distinct(self):
        if self.kind == "choices":
            return len(self.values)
        if self.step is None:
            return None
        return math.floor((self.values[1] - self.values[0]) / self.step + 1e-9) + 1


DROPOUT = Searched("model.dropout", "float", (0.0, 0.3))
SIZES = Searched("training.batch_size", "choices", (16, 32, 64))


def test_a_few_values_are_no_news():
    assert quantise.warnings([SIZES, Searched("model.dropout", "float", (0.0, 0.3), 0.05)], 500) == []
    assert quantise.warnings([DROPOUT], 8) == []  # eight trials have eight values at most


def test_many_values_are_told_with_what_to_write_instead():
    (line,) = quantise.warnings([DROPOUT, SIZES], 500)
    assert line.startswith("hpo.space.model.dropout makes up to 500 values in 500 trials")
    assert line.endswith("hpo.space.model.dropout={float: [0, 0.3], step: 0.1}")


@pytest.mark.parametrize(
    ("one", "offered"),
    [
        (Searched("d", "float", (0.0, 0.5)), "hpo.space.d={float: [0, 0.5], step: 0.1}"),
        (Searched("d", "float", (0.05, 0.9)), "hpo.space.d={float: [0.05, 0.85], step: 0.2}"),
        (Searched("d", "int", (1, 100)), "hpo.space.d={int: [1, 81], step: 20}"),
        (Searched("d", "int", (8, 512), 8), "hpo.space.d={int: [8, 408], step: 200}"),
        (Searched("d", "log", (1e-3, 0.5)), "hpo.space.d={choices: [0.001, 0.0035, 0.012, 0.042, 0.14, 0.5]}"),
        (Searched("d", "choices", tuple(range(0, 30, 3))), "hpo.space.d={choices: [0, 6, 12, 15, 21, 27]}"),
    ],
)
def test_what_is_offered(one, offered):
    assert quantise.offer(one) == offered


@pytest.mark.parametrize("width", [0.003, 0.07, 0.1, 0.33, 0.9, 1.0, 7.0, 99.0, 12345.0])
def test_what_is_offered_has_a_few_values_within_the_range(width):
    text = quantise.offer(Searched("d", "float", (0.0, width)))
    low, top, step = map(float, re.findall(r"[\d.e+-]+\d|\d", text.partition("float")[2]))
    assert low == 0.0
    assert 0 < top <= width * (1 + 1e-9)
    assert 2 <= round((top - low) / step) + 1 <= 6


def test_trials_that_share_compiled_code():
    assert quantise.shared_runs([], 20) == 20
    assert quantise.shared_runs([SIZES], 60) == 20
    assert quantise.shared_runs([SIZES, Searched("model.dropout", "choices", (0.0, 0.1))], 60) == 10
    assert quantise.shared_runs([DROPOUT], 60) == 1
    assert quantise.shared_runs([SIZES], 2) == 1
