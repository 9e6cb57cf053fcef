"""Everything was compiled anew although an earlier start of the run had compiled it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count, figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "cold_cache"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a run that was started before compiles everything again",
        cause="the compile caches did not outlive the process: they are in a temporary folder, in a container that is "
        "gone, or switched off",
        cost="the full compile at every start, mostly ten times that of a warm one",
        change="keep them: set TORCHINDUCTOR_CACHE_DIR to a folder that stays, and take away "
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES if it is set",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for a run whose last start found nothing in the caches."""
    compiled = case.of(ev.Compiled)
    misses = sum(event.cache_misses for event in compiled)
    if case.starts > 1 and misses and not any(event.cache_hits for event in compiled):
        seconds = sum(event.seconds for event in compiled if event.cache_misses)
        yield PROBLEMS[0].advice(
            f"start no. {case.starts} of this run found none of {count(misses, 'graph')} in the compile caches, and "
            f"compiled for {figure(seconds)} s",
            seconds=seconds,
            compiles=len([event for event in compiled if event.cache_misses]),
        )
