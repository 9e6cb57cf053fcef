"""Finds the smallest region at fault: parts of a model are compiled alone, on an otherwise eager model, and compared.

What disagrees is halved until one module is left, then that module's children are looked at, and so on down. A module
whose children agree when each is compiled by itself is the region: its own code, or how its children are fused.
What cannot be compiled alone is neither innocent nor at fault: the result tells of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import time
from typing import TYPE_CHECKING, Any

import torch

from hotloop import measure
from hotloop._torch.graphs import is_own_file
from hotloop._torch.module import class_forward
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import paused, status, uncompile
from hotloop.compiling.fallback.causes import describe
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.measure import Limits
    from hotloop.step.prove.step_outputs import StepOutputs
    from hotloop.step.state.program import Program

_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
"""Modules that nobody calls: their children are."""


@dataclasses.dataclass(frozen=True)
class Region:
    """A module: its path from the model's name on, its class, and where its forward is written.

    ``inside`` is the innermost module around it whose forward is the user's own, where its own is not.
    """

    path: str
    kind: str
    file: str | None = None
    line: int | None = None
    inside: Region | None = None
    module: torch.nn.Module | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def location(self) -> str:
        """``file:line`` of its forward, or an empty string."""
        return f"{self.file}:{self.line}" if self.file else ""

    def __str__(self) -> str:
        around = f" in {self.inside}" if self.inside is not None else ""
        return f"{self.path} ({self.kind}{f', {self.location}' if self.file else ''}){around}"

    def to_dict(self) -> dict[str, Any]:
        """Give the region as plain JSON data."""
        inside = self.inside.to_dict() if self.inside is not None else None
        return {"path": self.path, "class": self.kind, "file": self.file, "line": self.line, "inside": inside}


@dataclasses.dataclass(frozen=True)
class Culprit:
    """What a search found.

    Args:
        regions: the smallest set that was seen to disagree when nothing else is compiled; one, as a rule. Empty where
            the fault was not found again.
        how: what was found about it, why the search went no further, and what could not be tested alone.
        tests: sets that were compiled and compared.
        seconds: what that took.
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
        """Give what was found as plain JSON data."""
        regions = [one.to_dict() for one in self.regions]
        return {"regions": regions, "how": self.how, "tests": self.tests, "seconds": self.seconds}


_SHOWN = 3
NOT_AGAIN = "it did not show again on the same batches, so that no part could be searched for"


class _OutOfTimeError(Exception):
    """The next test would take longer than there is time."""


class Answer(enum.Enum):
    """What a test of some regions says."""

    DISAGREES, AGREES, UNTESTED = enum.auto(), enum.auto(), enum.auto()


class Tests:
    """Compiles parts of a program's models alone and compares each such step with what eager made of it.

    Args:
        program: whose step.
        models: by name; how they are compiled now is set aside for the time of a test.
        calls: what runs the step, each with what eager made of it from the state that there is now.
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

    def answer(self, regions: Sequence[Region]) -> Answer:
        """Tell whether the step is wrong with these regions compiled and nothing else, or that nobody can tell.

        Regions that ran eagerly, since no preset of theirs compiled them, are noted in ``untested``; the answer is that
        of the others.

        Raises:
            _OutOfTimeError: there is no time for another test like the longest so far.
        """
        if self.spent + self._longest > self._seconds:
            raise _OutOfTimeError
        began = time.perf_counter()
        modules = [one.module for one in regions if one.module is not None]
        try:
            with _compiled_alone(self._models, modules, self._settings):
                answer = Answer.DISAGREES if self.disagrees_now() else Answer.AGREES
                self._note_eager(regions)
        except CandidateFailedError as error:
            if not error.undone:
                raise
            answer = Answer.UNTESTED
            if len(regions) == 1:
                self.untested[str(regions[0])] = describe(error.__cause__ or error)
        self.done += 1
        self._longest = max(self._longest, time.perf_counter() - began)
        return answer

    def _note_eager(self, regions: Sequence[Region]) -> None:
        """Note the regions that were to be compiled and stepped down to eager."""
        for region in regions:
            parts = status(region.module).components.values() if region.module is not None else ()
            for one in parts:
                if one.fallbacks and one.state == "eager":
                    self.untested[str(region)] = one.causes[0].reason if one.causes else "it ran eagerly"

    def disagrees_now(self) -> bool:
        """Tell whether the step is wrong with the models compiled as they are.

        Raises:
            CandidateFailedError: it raised.
        """
        found: dict[str, list[measure.Comparison]] = {}
        for run, made in self._calls:
            step = lambda run=run: proof.plain_run(self._program.holdings, run)  # noqa: E731 - one call's
            for kind, one in made.compare_run(self._program, step, self._limits).items():
                found.setdefault(kind, []).append(one)
        return any(not measure.over_steps(each).agrees for each in found.values())


@contextlib.contextmanager
def _compiled_alone(
    models: Mapping[str, torch.nn.Module], parts: Sequence[torch.nn.Module], settings: Mapping[str, Any]
) -> Iterator[None]:
    with paused(models.values()):
        try:
            for part in parts:
                compile_in_place(part, **settings)
            yield
        finally:
            for part in parts:
                uncompile(part)


def search(models: Mapping[str, torch.nn.Module], tests: Tests, *, shown: bool = False) -> Culprit:
    """Find the smallest set of regions that disagrees.

    Args:
        models: by name.
        tests: compiles and compares.
        shown: the whole is known to disagree in these tests; else that is looked at first.
    """
    suspects = [_region(name, model) for name, model in models.items()]
    how = ""
    try:
        if not shown and tests.answer(suspects) is not Answer.DISAGREES:
            return Culprit((), NOT_AGAIN + _untested(tests), tests.done, tests.spent)
        while not how:
            if len(suspects) > 1:
                suspects, how = _halved(suspects, tests)
                continue
            parts = children(suspects[0])
            if not parts:
                how = "it disagrees when nothing else is compiled" + _others(models, suspects[0], tests)
            elif found := _at_fault(parts, tests):
                suspects = found
            else:
                how = "its parts agree when each is compiled by itself: its own code, or how they are fused"
    except _OutOfTimeError:
        how = f"the search ended here, after {tests.spent:.0f} s"
    return Culprit(tuple(suspects), how + _untested(tests), tests.done, tests.spent)


def _untested(tests: Tests) -> str:
    """Say which regions nothing is known of, so that the fault may be in them as well."""
    told = [f"{region}: {why}" for region, why in list(tests.untested.items())[:_SHOWN]]
    more = f"; and {len(tests.untested) - _SHOWN} more" if len(tests.untested) > _SHOWN else ""
    return f". Could not be tested alone, and may be at fault: {'; '.join(told)}{more}" if told else ""


def _others(models: Mapping[str, torch.nn.Module], region: Region, tests: Tests) -> str:
    """Say whether other modules of a region's class disagree as well, as far as there is time to find out."""
    whole = [_region(name, model) for name, model in models.items()]
    alike = []
    while whole:
        one = whole.pop()
        whole += children(one)
        if type(one.module) is type(region.module) and one.module is not region.module:
            alike.append(one)
    try:
        more = bool(alike) and tests.answer(alike) is Answer.DISAGREES
    except _OutOfTimeError:
        return ""
    return f"; so do others of its class, of which there are {len(alike)}" if more else ""


def _halved(suspects: list[Region], tests: Tests) -> tuple[list[Region], str]:
    """Give the half that disagrees by itself; where neither does, all, and that."""
    middle = len(suspects) // 2
    for half in (suspects[:middle], suspects[middle:]):
        if found := _at_fault(half, tests):
            return found, ""
    return suspects, "they disagree only when they are compiled together"


def _at_fault(group: list[Region], tests: Tests) -> list[Region]:
    """Give those of a group that disagree, none where it agrees; one that cannot be tested is tested by halves."""
    answer = tests.answer(group)
    if answer is Answer.UNTESTED and len(group) > 1:
        middle = len(group) // 2
        return _at_fault(group[:middle], tests) or _at_fault(group[middle:], tests)
    return group if answer is Answer.DISAGREES else []


def children(region: Region) -> list[Region]:
    """Give the modules directly inside a region, those of lists and dictionaries in their place; each once."""
    found: dict[int, Region] = {}

    around = region if region.file is not None and is_own_file(region.file) else region.inside

    def add(path: str, module: torch.nn.Module) -> None:
        for name, child in module.named_children():
            if isinstance(child, _CONTAINERS):
                add(f"{path}.{name}", child)
            elif id(child) not in found:
                found[id(child)] = _region(f"{path}.{name}", child, around)

    if region.module is not None:
        add(region.path, region.module)
    return list(found.values())


def _region(path: str, module: torch.nn.Module, around: Region | None = None) -> Region:
    function = class_forward(type(module))
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    file, line = (code.co_filename, code.co_firstlineno) if code is not None else (None, None)
    inside = None if file is not None and is_own_file(file) else around
    return Region(path, type(module).__name__, file, line, inside, module)
