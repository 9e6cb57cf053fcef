"""Turns the measurements of a bench into its result: figures of each way, the verdict, and the run record."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from hotloop.measure import machine
from hotloop.prove.bench.courses import Course
from hotloop.prove.bench.result import Bench, Way
from hotloop.prove.bench.verdict import BASELINE, Steady, conclude, noise_of
from hotloop.record import RunRecord

if TYPE_CHECKING:
    import os

    from hotloop.prove.bench.rounds import Plan
    from hotloop.prove.workloads import Source


def finish(
    plan: Plan,
    *,
    total_steps: int | None,
    steps: int | None,
    source: Source,
    record: str | os.PathLike[str] | RunRecord | None,
) -> Bench:
    """Sum up a bench, and write its record.

    Args:
        plan: with all measurements.
        total_steps: that the verdict is about.
        steps: timed steps that were asked for.
        source: of the workload.
        record: a record that the caller owns, a folder for a new one, or None for a record in memory.
    """
    noise = noise_of(plan.again)
    figures = {way: Steady.of(plan.times, way, noise) for way in plan.live()}
    eager = figures[BASELINE].ms / 1e3
    courses = {}
    for way, steady in figures.items():
        cold_seconds = plan.start(way).cold_seconds + plan.compiled_before(way)
        courses[way] = Course(way, cold_seconds, eager if way == BASELINE else eager / steady.speed.median)
    verdict = conclude(list(courses.values()), plan.times, noise, total_steps)
    ways = tuple(
        _way(plan, way, figures[way], courses, total_steps)
        if way in figures
        else Way(name=way, reason=plan.failed[way])
        for way in plan.ways
    )
    bench = Bench(
        ways=ways,
        verdict=verdict.sentence,
        stretches=tuple((stretch.first, stretch.way) for stretch in verdict.stretches),
        noise=noise,
        total_steps=total_steps,
        notes=tuple(plan.notes),
    )
    settings = {"workload": source.name or source.why, "runs": list(plan.ways), "steps": steps}
    return dataclasses.replace(bench, document=_written(bench, plan, settings, record))


def _way(plan: Plan, way: str, steady: Steady, courses: dict[str, Course], total_steps: int | None) -> Way:
    ready, course, speed = plan.start(way), courses[way], steady.speed
    beside = way != BASELINE
    pays = course.overtakes(courses[BASELINE]) if steady.difference == "faster" else None
    return Way(
        name=way,
        step_ms=steady.ms,
        step_ms_low=steady.low,
        step_ms_high=steady.high,
        speed=speed.median if beside else None,
        speed_low=speed.low if beside else None,
        speed_high=speed.high if beside else None,
        difference=steady.difference if beside else None,
        paired_ms=1e3 * course.step_seconds,
        cold_seconds=course.cold_seconds,
        prepared_steps=ready.prepared_steps,
        prepared_seconds=ready.prepared_seconds,
        caches=ready.caches,
        warm_seconds=plan.here[way].prepared_seconds if way in plan.cold else None,
        compile_seconds=ready.compile_seconds,
        peak_bytes=ready.peak_bytes,
        preparing_bytes=ready.preparing_bytes,
        break_even_step=pays,
        total_seconds=None if total_steps is None else course.seconds(total_steps),
        as_asked=plan.as_asked[way] / plan.timed[way],
        notes=tuple(plan.notes_on(way)),
        block_ms=tuple(round(1e3 * sample.seconds, 5) for sample in plan.times[way] if sample is not None),
    )


def _written(
    bench: Bench, plan: Plan, settings: dict[str, Any], record: str | os.PathLike[str] | RunRecord | None
) -> dict[str, Any]:
    """Write the bench into a run record, and return its document."""
    owned = not isinstance(record, RunRecord)
    run = record if isinstance(record, RunRecord) else RunRecord(record)
    assert plan.device is not None
    run.update("environment", **machine.describe(plan.device))
    run.update("settings", name="hotloop bench", total_steps=bench.total_steps, **settings)
    components = {f"{way}: {name}": part for way, parts in plan.parts.items() for name, part in parts.items()}
    run.update("components", **components)
    figures = {
        "verdict": bench.verdict,
        "stretches": [{"first": first, "way": way} for first, way in bench.stretches],
        "noise": bench.noise if math.isfinite(bench.noise) else None,
        "notes": list(bench.notes),
    }
    ways = {way.name: way.to_record() for way in bench.ways}
    run.update("measurements", ways=ways, bench=figures, steps_done=sum(plan.timed.values()))
    best = bench.best(bench.total_steps) if bench.total_steps else bench.stretches[-1][1]
    run.append("verdicts", {"verdict": best, "reason": bench.verdict})
    if owned:
        run.finish()
    return run.document
