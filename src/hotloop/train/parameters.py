"""What a program says of its own settings, beside their types: `Range` and `Search`, for ``typing.Annotated``.

Neither needs an optional package, so that a program with annotations runs anywhere.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


Optimizer = Literal[
    "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
]  # fmt: skip
"""The classes of torch.optim that step by dense gradients alone; listed, since the page offers them without torch."""
ScheduleName = Literal["linear", "cosine", "constant", "one_cycle", "wsd"]


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a setting, both ends included: ``dropout: Annotated[float, hotloop.Range(0, 0.5)] = 0.1``.

    Args:
        low: the least value; None leaves this end open.
        high: the largest value; None leaves this end open.
    """

    low: float | None = None
    high: float | None = None

    __is_annotated_types_grouped_metadata__ = True  # pydantic reads the limits that `__iter__` yields

    def __iter__(self) -> Iterator[Any]:
        from annotated_types import Ge, Le  # noqa: PLC0415 - comes with pydantic, which alone iterates

        if self.low is not None:
            yield Ge(self.low)
        if self.high is not None:
            yield Le(self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How a search varies a setting: ``lr: Annotated[float, hotloop.Search(log=(1e-5, 1e-3))] = 1e-3``.

    The same words as below ``hpo.space``, which takes its place where it names the setting.

    Args:
        log: the two ends of a range, both included, whose values spread evenly by their logarithm; integers where
            both ends are (write 1.0 for numbers in between).
        float: the two ends of a range of numbers, both included.
        int: the two ends of a range of integers, both included.
        choices: the values to choose from.
        step: the distance of neighbours, with ``float`` and ``int``.
        when: settings with the values under which this one varies, such as ``{"program.kind": "wide"}``.
    """

    log: Sequence[Any] | None = None
    float: Sequence[Any] | None = None
    int: Sequence[Any] | None = None
    choices: Sequence[Any] | None = None
    step: Any = None
    when: Mapping[str, Any] | None = None

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """Return the setting's JSON Schema with the range beside it, for whoever makes a form of it."""
        return {**handler(schema), "search": self.to_dict()}

    def to_dict(self) -> dict[str, Any]:
        """Return what stands below ``hpo.space`` and the setting's name."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple | range) else value for name, value in given.items()}
