"""What a search tells whoever shows it: plain data, as it comes from any of its workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class SearchBegan:
    """A command began, or went on with, a search of so many trials, of which some are over already.

    ``best`` has ``number``, ``value`` and ``values`` of the best of those; None where none is complete.
    """

    total: int
    over: int
    best: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class TrialBegan:
    """A worker took a trial. ``attempt`` is 2 where the first one died or was interrupted; ``values``: its settings."""

    number: int
    attempt: int
    worker: int
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class TrialReported:
    """A trial has an intermediate value: of its ``step``-th validation, or the mean of so many folds."""

    number: int
    worker: int
    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class TrialEnded:
    """A trial is over.

    ``state`` is ``complete``, ``pruned``, ``failed`` or ``interrupted``; ``cause`` says why where it is not complete;
    ``best``: it is the best of the study so far.
    """

    number: int
    worker: int
    state: str
    value: float | None
    cause: str
    seconds: float
    best: bool = False


@dataclasses.dataclass(frozen=True)
class Said:
    """A line for people; ``stops`` where the search cannot go on for this reason."""

    text: str
    worker: int = 0
    stops: bool = False


Told = SearchBegan | TrialBegan | TrialReported | TrialEnded | Said
Tell = Callable[[Told], None]
"""Who hears of a search. In a search of several processes it is called in the one that was started."""

_KINDS: dict[str, type[Told]] = {
    kind.__name__: kind for kind in (SearchBegan, TrialBegan, TrialReported, TrialEnded, Said)
}


def to_dict(told: Told) -> dict[str, Any]:
    """Return the report as plain data, which can cross a pipe."""
    return {"kind": type(told).__name__, **dataclasses.asdict(told)}


def from_dict(data: Mapping[str, Any]) -> Told:
    """Read what `to_dict` gave."""
    return _KINDS[data["kind"]](**{key: value for key, value in data.items() if key != "kind"})


def line(told: Told) -> str:
    """Say it in a line; empty for what is too much for a log."""
    if isinstance(told, SearchBegan):
        return f"{told.over} of {told.total} trials are over already" if told.over else ""
    if isinstance(told, TrialBegan):
        values = "  ".join(f"{name.rsplit('.', 1)[-1]} {_figure(value)}" for name, value in told.values.items())
        again = f", attempt {told.attempt}" if told.attempt > 1 else ""
        return f"trial {told.number} began (worker {told.worker}{again}): {values}"
    if isinstance(told, TrialEnded):
        value = "" if told.value is None else f" {told.value:.4f}"
        best = " (best so far)" if told.best else ""
        cause = f": {told.cause}" if told.cause else ""
        return f"trial {told.number} {told.state}{value}{best} after {told.seconds:.1f} s{cause}"
    return told.text if isinstance(told, Said) else ""


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
