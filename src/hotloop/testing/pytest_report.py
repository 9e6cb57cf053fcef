"""A pytest plugin that writes the outcome of the conformance suites in a run, as one table.

::

    pytest -p hotloop.testing.pytest_report --conformance-report conformance.md tests/

Each class that subclasses `Conformance` is a column, each promise a row. A cell shows the outcome of the test, of a
test with parameters the worst. One process has to run all tests: with pytest-xdist, add ``-n 0``.
"""

from __future__ import annotations

import datetime as dt
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.testing.conformance import Conformance

_CELLS = {"passed": "yes", "skipped": "skipped", "failed": "**no**"}
"""The text of a cell by pytest's outcome, the best first."""


class _Report:
    """The outcomes of each suite's tests, as pytest reports them."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._tests: dict[str, tuple[type[Conformance], str]] = {}
        """Suite and name of each test by pytest's node id."""
        self._outcomes: dict[type[Conformance], dict[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Find the tests of conformance suites."""
        for item in items:
            suite = getattr(item, "cls", None)
            if isinstance(suite, type) and issubclass(suite, Conformance):
                self._tests[item.nodeid] = suite, item.originalname

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the outcome of a test: its call, or a setup or teardown that did not pass."""
        if report.nodeid not in self._tests or (report.when != "call" and report.outcome == "passed"):
            return
        suite, name = self._tests[report.nodeid]
        outcomes = self._outcomes.setdefault(suite, {})
        outcomes[name] = max(outcomes.get(name, "passed"), report.outcome, key=list(_CELLS).index)

    def pytest_sessionfinish(self) -> None:
        """Write the table."""
        self._path.write_text(report(self._outcomes), encoding="utf-8")


def pytest_addoption(parser: Any) -> None:
    """Add the option that names the file."""
    parser.addoption("--conformance-report", metavar="FILE", help="write the outcome of conformance suites to FILE")


def pytest_configure(config: Any) -> None:
    """Begin a report if the option asks for it.

    Raises:
        pytest.UsageError: pytest-xdist runs the tests in several processes, none of which knows all outcomes.
    """
    if path := config.getoption("--conformance-report"):
        if hasattr(config, "workerinput") or config.getoption("numprocesses", default=None):
            raise pytest.UsageError("--conformance-report: one process has to run all the tests: add -n 0")
        config.pluginmanager.register(_Report(path))


def report(outcomes: dict[type[Conformance], dict[str, str]]) -> str:
    """Return outcomes as a Markdown table, promises down and suites across; limits are numbered below it.

    Args:
        outcomes: per suite, pytest's outcome of each of its tests by name; a missing test was not run.
    """
    labels = [suite.label() for suite in outcomes]
    columns = [
        label if labels.count(label) == 1 else f"{label} ({suite.__module__}.{suite.__qualname__})"
        for label, suite in zip(labels, outcomes, strict=True)
    ]
    notes: dict[str, int] = {}
    rows = []
    for name, promise in Conformance.order():
        cells = [_cell(suite, name, of_suite.get(name, "not run"), notes) for suite, of_suite in outcomes.items()]
        rows.append(f"| {promise} | {' | '.join(cells)} |")
    head = ["| promise | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    below = [f"{number}. {why}" for why, number in notes.items()]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    where = f"Run on {date} with torch {torch.__version__} on {platform.machine()}, {device}."
    return "\n".join([*head, *rows, "", *below, *([""] if below else []), where, ""])


def _cell(suite: type[Conformance], name: str, outcome: str, notes: dict[str, int]) -> str:
    """Return the text of a cell; a limit gets a number in ``notes``."""
    if getattr(suite, name) is None:
        return "-"
    if outcome == "passed" and (why := suite.limits.get(name)) is not None:
        return f"see {notes.setdefault(why, len(notes) + 1)}"
    return _CELLS.get(outcome, outcome)
