"""What a conformance suite promises, test by test, and how each promise is kept: for reports and the docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class Promises:
    """A suite of tests, each of whose docstrings is a promise."""

    name: ClassVar[str] = ""
    """What a report calls the suite."""
    limits: ClassVar[Mapping[str, str]] = {}
    """Promises that the framework's hooks do not allow, by the test's name, with the reason: see `promises`."""

    @classmethod
    def label(cls) -> str:
        """Name the suite in a report: what ``name`` says, else the class."""
        return cls.name or cls.__name__.removeprefix("Test")

    @classmethod
    def order(cls) -> list[tuple[str, str]]:
        """Give the tests by name in the order in which they are written, each with the promise that it holds."""
        found = {name: getattr(cls, name) for name in dir(cls) if name.startswith("test_")}
        tests = {name: test for name, test in found.items() if test is not None}  # None: does not apply
        ordered = sorted(tests, key=lambda name: tests[name].__code__.co_firstlineno)
        return [(name, (tests[name].__doc__ or name).splitlines()[0]) for name in ordered]

    @classmethod
    def promises(cls) -> list[tuple[str, str]]:
        """Give each promise, as its test says it, and how it is kept: ``yes``, or what holds instead, and why."""
        order = cls.order()
        unknown = sorted(set(cls.limits) - {name for name, _ in order})
        check(not unknown, f"limits name tests that do not exist: {unknown}")
        return [(promise, cls.limits.get(name, "yes")) for name, promise in order]

    @classmethod
    def table(cls) -> str:
        """Give `promises` as a Markdown table, for the docs."""
        rows = [f"| {promise} | {kept} |" for promise, kept in cls.promises()]
        return "\n".join(["| promise | kept |", "|---|---|", *rows])


def check(holds: bool, message: str) -> None:
    """Assert in a module that pytest does not rewrite, with a message that says what was found."""
    if not holds:
        raise AssertionError(message)
