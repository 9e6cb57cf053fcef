"""What a search is told about settings of which each value is compiled anew."""

import dataclasses
import math

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
    assert line.endswith("give it choices, or a range with a step")


def test_trials_that_share_compiled_code():
    assert quantise.shared_runs([], 20) == 20
    assert quantise.shared_runs([SIZES], 60) == 20
    assert quantise.shared_runs([SIZES, Searched("model.dropout", "choices", (0.0, 0.1))], 60) == 10
    assert quantise.shared_runs([DROPOUT], 60) == 1
    assert quantise.shared_runs([SIZES], 2) == 1
