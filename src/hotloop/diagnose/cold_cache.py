"""A later start of a run finds nothing in the compile caches and compiles everything again."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule
from hotloop.diagnose.words import count, figure


class ColdCache(Rule):
    problems = (
        Problem(
            rule="cold_cache",
            symptom="a run that was started before compiles everything again",
            cause="the compile caches did not outlive the process: they are in a temporary folder, in a container "
            "that is gone, or switched off",
            cost="the full compile at every start, mostly ten times a warm one",
            change="keep them: set TORCHINDUCTOR_CACHE_DIR to a folder that stays, and unset "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice for the run, about its last start."""
        compiled = case.of(ev.Compiled)
        missed = [event for event in compiled if event.cache_misses]
        if case.starts > 1 and missed and not any(event.cache_hits for event in compiled):
            graphs = count(sum(event.cache_misses for event in missed), "graph")
            seconds = sum(event.seconds for event in missed)
            yield self.problem().advice(
                f"start no. {case.starts} of this run found none of {graphs} in the compile caches, and compiled for "
                f"{figure(seconds)} s",
                seconds=seconds,
                compiles=len(missed),
            )
