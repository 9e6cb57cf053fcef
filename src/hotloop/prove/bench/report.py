"""From what a bench measured to what it gives: figures of each way, the verdict, and the run record."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hotloop.decide import Course
from hotloop.measure import machine
from hotloop.prove.bench import verdict as judge
from hotloop.prove.bench.result import Bench, Way
from hotloop.prove.bench.verdict import BASELINE
from hotloop.record import RunRecord

if TYPE_CHECKING:
    import os

    from hotloop.prove.bench.rounds import Plan
    from hotloop.prove.bench.verdict import Steady, Verdict
    from hotloop.prove.bench.way import Ready
    from hotloop.prove.workloads import Source

_NOT_WHOLE = 0.995


def finish(
    plan: Plan,
    *,
    total_steps: int | None,
    steps: int | None,
    source: Source,
    record: str | os.PathLike[str] | RunRecord | None,
) -> Bench:
    """Sum a bench up, and write its record.

    Args:
        plan: with everything that was measured.
        total_steps: that the verdict is about.
        steps: timed steps that were asked for.
        source: of the workload.
        record: a record that somebody else owns, a folder for a new one, or None for one in memory.
    """
    noise = judge.noise_of(plan.again)
    figures = {way: judge.steady(plan.times, way, noise) for way in plan.live()}
    eager = figures[BASELINE].ms / 1e3
    courses = {
        way: Course(way, _cold_seconds(plan, way), eager if way == BASELINE else eager / one.speed.median)
        for way, one in figures.items()
    }
    verdict = judge.conclude(list(courses.values()), plan.times, noise, total_steps)
    ways = tuple(
        _way(plan, way, figures[way], courses, total_steps)
        if way in figures
        else Way(name=way, reason=plan.failed[way])
        for way in plan.ways
    )
    found = Bench(
        ways=ways,
        verdict=verdict.sentence,
        stretches=tuple((one.first, one.way) for one in verdict.stretches),
        noise=noise,
        total_steps=total_steps,
        notes=tuple(plan.notes),
    )
    settings = {"workload": source.name or source.why, "runs": list(plan.ways), "steps": steps}
    return dataclasses.replace(found, document=_written(found, plan, verdict, settings, record))


def _cold_seconds(plan: Plan, way: str) -> float:
    """Give what getting ready took; what was compiled for it by another way in this process is counted as its own."""
    return _start_of(plan, way).cold_seconds + _compiled_before(plan, way)


def _start_of(plan: Plan, way: str) -> Ready:
    return plan.cold.get(way) or plan.here[way]


def _compiled_before(plan: Plan, way: str) -> float:
    if way in plan.cold or way not in plan.shared:
        return 0.0
    return max(0.0, plan.here[plan.shared[way]].compile_seconds - plan.here[way].compile_seconds)


def _way(plan: Plan, way: str, figures: Steady, courses: dict[str, Course], total_steps: int | None) -> Way:
    ready, course, speed = _start_of(plan, way), courses[way], figures.speed
    beside = way != BASELINE
    pays = course.overtakes(courses[BASELINE]) if figures.difference == "faster" else None
    return Way(
        name=way,
        step_ms=figures.ms,
        step_ms_low=figures.low,
        step_ms_high=figures.high,
        speed=speed.median if beside else None,
        speed_low=speed.low if beside else None,
        speed_high=speed.high if beside else None,
        difference=figures.difference if beside else None,
        paired_ms=1e3 * course.step_seconds,
        cold_seconds=course.cold_seconds,
        prepared_steps=ready.prepared_steps,
        prepared_seconds=ready.prepared_seconds,
        caches=_caches(ready),
        warm_seconds=plan.here[way].prepared_seconds if way in plan.cold else None,
        compile_seconds=ready.compile_seconds,
        peak_bytes=ready.peak_bytes,
        preparing_bytes=ready.preparing_bytes,
        break_even_step=pays,
        total_seconds=None if total_steps is None else course.seconds(total_steps),
        as_asked=plan.as_asked[way] / plan.timed[way],
        notes=tuple(_notes(plan, way)),
        block_ms=tuple(round(1e3 * one.seconds, 5) for one in plan.times[way] if one is not None),
    )


def _caches(ready: Ready) -> str:
    if not ready.cache_hits + ready.cache_misses:
        return "none"
    return "empty" if ready.cache_misses else "warm"


def _notes(plan: Plan, way: str) -> list[str]:
    found = []
    share = plan.as_asked[way] / plan.timed[way]
    if share < _NOT_WHOLE:
        found.append(f"{share:.0%} of its steps ran as asked, the others as written: shapes that it has no code for")
    for name, part in plan.parts.get(way, {}).items():
        if part["state"] == "partial":
            causes = "; ".join(dict.fromkeys(str(cause["reason"]) for cause in part["causes"]))
            found.append(
                f"{name} is compiled in part ({part['graph_breaks']} graph breaks): {causes or 'no cause known'}"
            )
    if _compiled_before(plan, way):
        found.append(f"its cold seconds count the compile that it found made for {plan.shared[way]}")
    return found


def _written(
    found: Bench,
    plan: Plan,
    verdict: Verdict,
    settings: dict[str, Any],
    record: str | os.PathLike[str] | RunRecord | None,
) -> dict[str, Any]:
    """Write the bench into a run record, and give its document."""
    owned = not isinstance(record, RunRecord)
    run = record if isinstance(record, RunRecord) else RunRecord(record)
    assert plan.device is not None
    run.update("environment", **machine.describe(plan.device))
    run.update("settings", name="hotloop bench", total_steps=found.total_steps, **settings)
    run.update(
        "components", **{f"{way}: {name}": one for way, parts in plan.parts.items() for name, one in parts.items()}
    )
    ways = {one.name: _entry(one) for one in found.ways}
    measured = {"noise": found.noise if math.isfinite(found.noise) else None, "notes": list(found.notes)}
    stretches = [{"first": one.first, "way": one.way} for one in verdict.stretches]
    run.update(
        "measurements",
        ways=ways,
        bench={"verdict": verdict.sentence, "stretches": stretches, **measured},
        steps_done=sum(plan.timed.values()),
    )
    best = found.best(found.total_steps) if found.total_steps else verdict.stretches[-1].way
    run.append("verdicts", {"verdict": best, "reason": verdict.sentence})
    if owned:
        run.finish()
    return run.document


def _entry(way: Way) -> dict[str, Any]:
    """Give a way for the record: what is known of it, ``failed`` where it was not timed."""
    known = {key: value for key, value in way.to_dict().items() if value not in (None, "", []) and key != "name"}
    if "reason" in known:
        return {"failed": known["reason"]}
    return known
