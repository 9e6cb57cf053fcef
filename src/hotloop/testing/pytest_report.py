"""A pytest plugin that writes what became of the conformance suites in a run, as one table.

::

    pytest -p hotloop.testing.pytest_report --conformance-report conformance.md tests/

Each class that subclasses `Conformance` is a column, each promise a row; a cell is what the run found, of a test with
parameters the worst. It is written by one process: with pytest-xdist, add ``-n 0``.
"""

from __future__ import annotations

import datetime as dt
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.testing.conformance import Conformance

_WORDS = {"passed": "yes", "skipped": "skipped", "failed": "**no**"}
_WORSE = list(_WORDS)


class _Report:
    """What became of each suite's tests."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._of: dict[str, tuple[type[Conformance], str]] = {}
        self._found: dict[type[Conformance], dict[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Note which tests are of a suite."""
        for item in items:
            kind = getattr(item, "cls", None)
            if isinstance(kind, type) and issubclass(kind, Conformance):
                self._of[item.nodeid] = kind, item.originalname

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note what became of one."""
        if report.nodeid not in self._of or (report.when != "call" and report.outcome == "passed"):
            return
        kind, name = self._of[report.nodeid]
        found = self._found.setdefault(kind, {})
        found[name] = max(found.get(name, "passed"), report.outcome, key=_WORSE.index)

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        self._path.write_text(report(self._found), encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    """Add the option that names the file."""
    parser.addoption("--conformance-report", metavar="FILE", help="write what became of conformance suites to FILE")


def pytest_configure(config: Any) -> None:
    """Begin a report where one is asked for.

    Raises:
        pytest.UsageError: pytest-xdist runs the tests in processes of its own, of which none knows them all.
    """
    if path := config.getoption("--conformance-report"):
        if hasattr(config, "workerinput") or config.getoption("numprocesses", default=None):
            raise pytest.UsageError("--conformance-report: one process has to run all the tests: add -n 0")
        config.pluginmanager.register(_Report(path))


def report(found: dict[type[Conformance], dict[str, str]]) -> str:
    """Give outcomes as a Markdown table, promises down and suites across, with what holds in a promise's stead below.

    Args:
        found: per suite, pytest's outcome of each of its tests by name; what is not there was not run.
    """
    labels = [kind.label() for kind in found]
    suites = {
        label if labels.count(label) == 1 else f"{label} ({kind.__module__}.{kind.__qualname__})": (kind, outcomes)
        for label, (kind, outcomes) in zip(labels, found.items(), strict=True)
    }
    notes: dict[str, int] = {}
    rows = []
    for name, promise in Conformance.order():
        cells = [_cell(kind, name, outcomes, notes) for kind, outcomes in suites.values()]
        rows.append(f"| {promise} | {' | '.join(cells)} |")
    head = ["| promise | " + " | ".join(suites) + " |", "|---|" + "---|" * len(suites)]
    below = [f"{number}. {why}" for why, number in notes.items()]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    where = f"Run on {date} with torch {torch.__version__} on {platform.machine()}, {_device()}."
    return "\n".join([*head, *rows, "", *below, *([""] if below else []), where, ""])


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"


def _cell(kind: type[Conformance], name: str, outcomes: dict[str, str], notes: dict[str, int]) -> str:
    if getattr(kind, name) is None:
        return "-"
    outcome = outcomes.get(name, "not run")
    if outcome == "passed" and (why := kind.limits.get(name)) is not None:
        return f"see {notes.setdefault(why, len(notes) + 1)}"
    return _WORDS.get(outcome, outcome)
