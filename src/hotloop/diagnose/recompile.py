"""Recompiles, by what changed: one advice for all recompiles that the same thing caused, with their compiles."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hotloop import events as ev
from hotloop.diagnose.guards import LEFT_BEHIND, Guard, guard_of
from hotloop.diagnose.recompile_words import PROBLEMS, problem_of, what_of
from hotloop.diagnose.rule import Case, Found, Rule, grouped


@dataclasses.dataclass
class RecompiledFrame:
    """A recompile with the compiles of its frame, backward among them."""

    event: ev.Recompiled
    compiles: list[ev.Compiled] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds that the compiles took."""
        return sum(compiled.seconds for compiled in self.compiles)

    def is_caused_by(self, broken: ev.GraphBreak) -> bool:
        """Return whether a graph break caused it: a value that the break left behind, or what Lightning's log keeps."""
        if self.event.component != broken.component:
            return False
        if LEFT_BEHIND.search(self.event.reason):
            places = {(broken.file, broken.line), (broken.by_file, broken.by_line)}
            return (self.event.file, resumed_at(self.event.function)) in places
        return "_ResultCollection.log" in broken.reason and "_results" in self.event.reason


def recompiles(case: Case) -> list[RecompiledFrame]:
    """Return every recompile with the compiles of the same frame.

    They follow the recompile; if a batch size got code of its own, they come before it.
    """
    found: list[RecompiledFrame] = []
    latest: dict[tuple[str | None, str], RecompiledFrame] = {}
    before: dict[tuple[str | None, str], list[ev.Compiled]] = {}
    for event in case.events:
        if isinstance(event, ev.Recompiled):
            key = event.component, event.frame
            found.append(RecompiledFrame(event, before.pop(key, [])))
            if event.frame:
                latest[key] = found[-1]
        elif isinstance(event, ev.Compiled) and event.frame:
            key = event.component, event.frame
            owner = latest.get(key)
            (owner.compiles if owner else before.setdefault(key, [])).append(event)
    return found


def count(recompiled: Iterable[RecompiledFrame]) -> int:
    """Return how many times code was compiled; a backward counts as one with its forward."""
    return sum(max(1, sum(compiled.phase == "forward" for compiled in frame.compiles)) for frame in recompiled)


def resumed_at(function: str) -> int | None:
    """Return the line of the graph break behind which a function goes on; None for any other function."""
    resumed = re.match(r"^torch_dynamo_resume_in_.*_at_(?P<line>\d+)$", function)
    return int(resumed["line"]) if resumed else None


Group = list[tuple[RecompiledFrame, Guard]]


class Recompile(Rule):
    problems = PROBLEMS
    whole = frozenset({"grad_mode", "threads", "precision", "setting", "train_eval", "size"})
    """Causes that meet many places of a component at once: a mode, or a size that every frame and argument sees."""

    def find(self, case: Case) -> Found:
        """Yield one advice per thing that changed."""
        for kind, group in self.groups(case):
            first = next((frame.event for frame, _ in group if frame.event.file), group[0][0].event)
            yield problem_of(kind).advice(
                what_of(kind, [guard for _, guard in group]),
                **case.place(first),
                times=len(group),
                compiles=count(frame for frame, _ in group),
                seconds=sum(frame.seconds for frame, _ in group),
            )

    def groups(self, case: Case) -> Iterator[tuple[str, Group]]:
        """Yield each thing that changed, by its kind in the catalogue, with the recompiles that it caused."""
        breaks = case.of(ev.GraphBreak)  # their advice counts the recompiles that they cause
        frames = [frame for frame in recompiles(case) if not any(map(frame.is_caused_by, breaks))]
        for group in grouped([(frame, guard_of(frame.event)) for frame in frames], self._key):
            guards = [guard for _, guard in group]
            yield self.kind_of_sizes(guards, case) if guards[0].cause == "size" else guards[0].cause, group

    def _key(self, item: tuple[RecompiledFrame, Guard]) -> tuple[object, ...]:
        frame, guard = item
        key = frame.event.component, guard.cause
        if guard.cause == "setting":
            return *key, *guard.values
        if guard.cause == "size":
            return *key, guard.dim
        return key if guard.cause in self.whole else (*key, guard.subject)

    def kind_of_sizes(self, guards: list[Guard], case: Case) -> str:
        """Return ``ragged_batch`` if the first dimension had one size and an odd smaller one, else ``dynamic_lengths``.

        The run's census of shapes knows all sizes, if it has one. torch alone names the first two only, since it makes
        a size dynamic at its second value. Without a census, a smaller second size of the first dimension is taken for
        the odd one.
        """
        if guards[0].dim != 0:
            return "dynamic_lengths"
        distinct = self.distinct_sizes(guards, case.measurements.get("shapes"))
        if distinct is None:
            odd = all(_became_smaller(guard.values) for guard in guards)
            distinct = len({value for guard in guards for value in guard.values}) if odd else 0
        return "ragged_batch" if distinct == 2 else "dynamic_lengths"  # noqa: PLR2004 - the usual size and the odd one

    @staticmethod
    def distinct_sizes(guards: list[Guard], shapes: object) -> int | None:
        """Return how many sizes the first dimension of a step's input had, of an input that had the guards' sizes.

        Args:
            guards: failed guards on sizes.
            shapes: the record's censuses, each by its step's name; None is returned if no census has such an input.
        """
        sizes = [int(value) for guard in guards for value in guard.values if value.isdigit()]
        counts = []
        for census in shapes.values() if isinstance(shapes, Mapping) and sizes else ():
            dims: Any = census.get("varying_dims") if isinstance(census, Mapping) else None
            for dim in dims if isinstance(dims, list | tuple) else ():
                if not isinstance(dim, Mapping) or dim.get("dim") != 0:
                    continue
                least, most, distinct = (dim.get(key) for key in ("least", "most", "distinct"))
                if not (isinstance(least, int) and isinstance(most, int) and isinstance(distinct, int)):
                    continue
                if least <= min(sizes) and max(sizes) <= most:
                    counts.append(distinct)
        return max(counts, default=None)


def _became_smaller(sizes: tuple[str, ...]) -> bool:
    """Return whether the second of two sizes is the smaller one, or 1."""
    if len(sizes) != 2:  # noqa: PLR2004 - a size before and after
        return False
    before, after = sizes
    return after == "1" or (before.isdigit() and after.isdigit() and int(after) < int(before))
