"""Recompiles, by what changed: one advice for all recompiles that the same thing caused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.compiles import Recompile, count, is_breaks, recompiles
from hotloop.diagnose.guards import Guard, guard_of
from hotloop.diagnose.recompile_words import PROBLEMS, problem_of, what_of
from hotloop.diagnose.sizes import kind_of_sizes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

__all__ = ["PROBLEMS", "find", "grouped"]

_WHOLE = frozenset({"grad_mode", "threads", "precision", "setting", "train_eval", "size"})
"""Causes that meet many places of a component at once: a mode, or a size that every frame and argument sees."""
Group = list[tuple[Recompile, Guard]]


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each thing that changed."""
    for kind, group in grouped(case):
        first = next((one.event for one, _ in group if one.event.file), group[0][0].event)
        problem = problem_of(kind)
        yield problem.advice(
            what_of(kind, [guard for _, guard in group]),
            component=first.component,
            file=first.file,
            line=first.line,
            source=first.source or case.source(first.file, first.line),
            times=len(group),
            compiles=count(one for one, _ in group),
            seconds=sum(one.seconds for one, _ in group),
        )


def grouped(case: Case) -> Iterator[tuple[str, Group]]:
    """Give each thing that changed, as the catalogue names it, with the recompiles that it caused."""
    groups: dict[tuple[object, ...], Group] = {}
    broken_at = case.of(ev.GraphBreak)
    for one in recompiles(case):
        guard = guard_of(one.event)
        if not any(is_breaks(one, broken) for broken in broken_at):  # the graph break's advice counts it
            groups.setdefault(_key(one, guard), []).append((one, guard))
    for group in groups.values():
        cause = group[0][1].cause
        yield kind_of_sizes([guard for _, guard in group], case) if cause == "size" else cause, group


def _key(one: Recompile, guard: Guard) -> tuple[object, ...]:
    key = one.event.component, guard.cause
    if guard.cause == "setting":
        return *key, *guard.values
    if guard.cause == "size":
        return *key, guard.dim
    return key if guard.cause in _WHOLE else (*key, guard.subject)
