"""Finds the smallest region at fault: parts of a model are compiled alone, on an otherwise eager model, and compared.

The set that disagrees is halved until one module is left. Then that module's children are searched, and so on down. The
culprit is a module whose children agree when each is compiled by itself: its own code, or how its children are fused.
A part that cannot be compiled alone is neither innocent nor at fault, and the result names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from hotloop import measure
from hotloop._torch.module import class_forward
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import paused, status, uncompile
from hotloop.errors import describe
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.measure import Limits
    from hotloop.step.prove.reference_runs import StepOutputs
    from hotloop.step.state.program import Program

_SHOWN = 3
"""The most regions that a message names."""
_NOT_AGAIN = "it did not show again on the same batches, so that no part could be searched for"


@dataclasses.dataclass(frozen=True)
class Region:
    """A module: its path from the model's name on, its class, and the place where its forward is written."""

    path: str
    kind: str
    file: str | None
    line: int | None
    module: torch.nn.Module = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, path: str, module: torch.nn.Module) -> Region:
        """Return the region of a module."""
        function = class_forward(type(module))
        code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else (None, None)
        return cls(path, type(module).__name__, file, line, module)

    def __str__(self) -> str:
        return f"{self.path} ({self.kind}{f', {self.file}:{self.line}' if self.file else ''})"

    def to_dict(self) -> dict[str, Any]:
        """Return the region as plain JSON data."""
        return {"path": self.path, "class": self.kind, "file": self.file, "line": self.line}

    def children(self) -> list[Region]:
        """Return the modules directly inside, each once; in place of a list or dictionary, the modules in it."""
        found: dict[int, Region] = {}
        containers = torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict

        def add(path: str, module: torch.nn.Module) -> None:
            for name, child in module.named_children():
                if isinstance(child, containers):  # nobody calls these, only their children
                    add(f"{path}.{name}", child)
                else:
                    found.setdefault(id(child), Region.of(f"{path}.{name}", child))

        add(self.path, self.module)
        return list(found.values())


@dataclasses.dataclass(frozen=True)
class Culprit:
    """The result of a search.

    Args:
        regions: the smallest set that was seen to disagree when nothing else is compiled, mostly a single region. Empty
            if the fault was not found again.
        how: what was found about it, why the search went no further, and what could not be tested alone.
        tests: how many sets were compiled and compared.
        seconds: the time that the search took.
    """

    regions: tuple[Region, ...]
    how: str
    tests: int
    seconds: float

    def __str__(self) -> str:
        named = " and ".join(map(str, self.regions[:_SHOWN]))
        more = f" and {len(self.regions) - _SHOWN} more" if len(self.regions) > _SHOWN else ""
        return f"{named}{more}: {self.how}" if self.regions else self.how

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON data."""
        regions = [region.to_dict() for region in self.regions]
        return {"regions": regions, "how": self.how, "tests": self.tests, "seconds": self.seconds}


class _OutOfTimeError(Exception):
    """The next test would take longer than there is time."""


class Tests:
    """Tests of parts of a program's models: each is compiled alone, and its step is compared with eager's outputs.

    Args:
        program: the program of the step.
        models: by name; code that is compiled for them now is set aside during a test.
        calls: functions that run the step, each with eager's outputs from the present state.
        limits: how far compiled code may be from eager.
        settings: the arguments for `hotloop.compile`.
        seconds: how long all tests may take.
    """

    def __init__(  # noqa: PLR0913 - what a test is made of
        self,
        program: Program,
        models: Mapping[str, torch.nn.Module],
        calls: Sequence[tuple[Callable[[], Any], StepOutputs]],
        *,
        limits: Limits,
        settings: Mapping[str, Any],
        seconds: float,
    ) -> None:
        self._program, self._models, self._calls = program, dict(models), list(calls)
        self._limits, self._settings = limits, dict(settings)
        self._began, self._seconds, self._longest = time.perf_counter(), seconds, 0.0
        self.done = 0
        self.untested: dict[str, str] = {}
        """Regions that could not be compiled alone, by path, and why."""

    @property
    def spent(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self._began

    def disagrees_now(self) -> bool:
        """Return whether the step is wrong with the models compiled as they are.

        Raises:
            CandidateFailedError: the step raised.
        """
        found: dict[str, list[measure.Comparison]] = {}
        for run, outputs in self._calls:
            step = lambda run=run: proof.plain_run(self._program.holdings, run)  # noqa: E731 - one call's
            for kind, comparison in outputs.compare_run(self._program, step, self._limits).items():
                found.setdefault(kind, []).append(comparison)
        return any(not measure.over_steps(comparisons).agrees for comparisons in found.values())

    def disagree(self, regions: Sequence[Region]) -> bool | None:
        """Return whether the step is wrong with only these regions compiled; None if that could not be tested.

        Regions that ran eagerly, because no preset of theirs compiled them, are noted in ``untested``; the answer is
        that of the other regions.

        Raises:
            _OutOfTimeError: there is no time for another test like the longest so far.
        """
        if self.spent + self._longest > self._seconds:
            raise _OutOfTimeError
        began = time.perf_counter()
        answer: bool | None = None
        try:
            with self._compiled_alone([region.module for region in regions]):
                answer = self.disagrees_now()
                self._note_eager(regions)
        except CandidateFailedError as error:
            if not error.undone:
                raise
            if len(regions) == 1:
                self.untested[str(regions[0])] = describe(error.__cause__ or error)
        self.done += 1
        self._longest = max(self._longest, time.perf_counter() - began)
        return answer

    @contextlib.contextmanager
    def _compiled_alone(self, parts: Sequence[torch.nn.Module]) -> Iterator[None]:
        with paused(self._models.values()):
            try:
                for part in parts:
                    compile_in_place(part, **self._settings)
                yield
            finally:
                for part in parts:
                    uncompile(part)

    def _note_eager(self, regions: Sequence[Region]) -> None:
        """Note the regions that were to be compiled and stepped down to eager."""
        for region in regions:
            for part in status(region.module).components.values():
                if part.fallbacks and part.state == "eager":
                    self.untested[str(region)] = part.causes[0].reason if part.causes else "it ran eagerly"

    def at_fault(self, regions: list[Region]) -> list[Region]:
        """Return the regions if they disagree, else none; a set that cannot be tested is tested by halves."""
        answer = self.disagree(regions)
        if answer is None and len(regions) > 1:
            middle = len(regions) // 2
            return self.at_fault(regions[:middle]) or self.at_fault(regions[middle:])
        return regions if answer else []

    def result(self, regions: Sequence[Region], how: str) -> Culprit:
        """Return the result of the search, which names the regions that could not be tested and may be at fault."""
        named = [f"{region}: {why}" for region, why in list(self.untested.items())[:_SHOWN]]
        more = f"; and {len(self.untested) - _SHOWN} more" if len(self.untested) > _SHOWN else ""
        if named:
            how += f". Could not be tested alone, and may be at fault: {'; '.join(named)}{more}"
        return Culprit(tuple(regions), how, self.done, self.spent)


def search(models: Mapping[str, torch.nn.Module], tests: Tests) -> Culprit:
    """Find the smallest set of regions that disagrees.

    Args:
        models: by name.
        tests: compiles and compares.
    """
    suspects = [Region.of(name, model) for name, model in models.items()]
    how = ""
    try:
        if not tests.disagree(suspects):
            return tests.result((), _NOT_AGAIN)
        while not how:
            if len(suspects) > 1:
                middle = len(suspects) // 2
                half = tests.at_fault(suspects[:middle]) or tests.at_fault(suspects[middle:])
                if not half:
                    how = "they disagree only when they are compiled together"
                suspects = half or suspects
            elif not (parts := suspects[0].children()):
                how = "it disagrees when nothing else is compiled"
            elif found := tests.at_fault(parts):
                suspects = found
            else:
                how = "its parts agree when each is compiled by itself: its own code, or how they are fused"
    except _OutOfTimeError:
        how = f"the search ended here, after {tests.spent:.0f} s"
    return tests.result(suspects, how)
