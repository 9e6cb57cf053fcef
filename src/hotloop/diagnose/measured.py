"""Rules on a run's figures: what was timed, what memory was needed, what was found in the compile caches."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hotloop import events as ev
from hotloop.diagnose.case import Case, number, overlap
from hotloop.diagnose.rule import Found, Problem
from hotloop.diagnose.words import figure
from hotloop.report.text import count, size

NOT_TRAINED = Problem(
    rule="not_trained",
    symptom="no parameter changes",
    cause="the step calls no backward or no step of the optimizer, the optimizer has other parameters, or its "
    "learning rate is 0",
    cost="all that its steps take",
    change="call loss.backward() and optimizer.step() in the step, with an optimizer of the model's parameters",
)
SLOWER_PRESET = Problem(
    rule="slower_preset",
    symptom="a preset or tier is slower than eager",
    cause="the model is too small, or too often broken into parts, for compiled code to make up for the cost "
    "of its calls: guards and launches cost 20 to 60 µs each",
    cost="the difference at every step, and the compiles",
    change="run eager, or a tier that captures the whole step; fix graph breaks first",
    remedy="tier",
)
DATA_WAIT = Problem(
    rule="data_wait",
    symptom="steps wait for their batches",
    cause="batches are made more slowly than steps take them; no tier makes that faster",
    cost="the wait of every step",
    change="load in more worker processes: DataLoader(num_workers=..., persistent_workers=True, "
    "pin_memory=True); or do once, before the training, what each epoch repeats (decoding, tokenizing)",
)
NEVER_PAYS = Problem(
    rule="never_pays",
    symptom="a compile never pays in the steps planned",
    cause="its saving per step, times the planned steps, is less than its compiles take",
    cost="the compile's seconds, less what it saved",
    change="run eager or a tier that costs no compile, compile by blocks, or keep the compile caches for later",
    remedy="tier",
)
COLD_CACHE = Problem(
    rule="cold_cache",
    symptom="a run that was started before compiles everything again",
    cause="the compile caches did not outlive the process: they are in a temporary folder, in a container "
    "that is gone, or switched off",
    cost="the full compile at every start, mostly ten times a warm one",
    change="keep them: set TORCHINDUCTOR_CACHE_DIR to a folder that stays, and unset "
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES",
)
MEMORY = Problem(
    rule="memory",
    kind="more",
    symptom="compiled or captured steps need more memory than eager",
    cause="CUDA graphs keep memory of their own for each shape, and compiled code may keep more for its backward",
    cost="memory, until a run fails for lack of it",
    change="fewer shapes (buckets), a preset without CUDA graphs (default, aot_eager), or fewer components",
    remedy="tier",
)
NEAR_LIMIT = Problem(
    rule="memory",
    kind="near_limit",
    symptom="the device's memory is nearly full",
    cause="what a step needs and what is kept between steps nearly fill the device",
    cost="the run, at the first batch that needs more",
    change="a smaller batch, activation checkpointing, preset aot_eager, or fewer compiled components",
)
NOISE = 1.03
"""Step times closer than this factor count as equal."""
_LEAST_WAIT = 0.1
"""Share of the time that steps wait for batches; below it there is little to gain."""
_MORE, _LEAST_BYTES = 1.1, 32 * 2**20
"""How much more than eager's peak memory is told: smaller changes are the allocator's."""
_NEARLY = 0.9
"""Share of the device's memory beyond which the next longer batch may not fit."""


def find_not_trained(case: Case) -> Found:
    """Yield one advice where no parameter that requires a gradient has changed in any step."""
    figures = case.measurements.get("trained")
    figures = figures if isinstance(figures, Mapping) else {}
    parameters, unchanged, steps = (number(figures.get(name)) for name in ("parameters", "unchanged", "steps"))
    if parameters and steps and unchanged == parameters:
        yield NOT_TRAINED.advice(
            f"none of {parameters:,.0f} parameters that require a gradient has changed in {steps:,.0f} steps",
            milliseconds=number(case.way("eager").get("step_ms")),
        )


def find_slower(case: Case) -> Found:
    """Yield one advice per way that is slower than eager by more than the noise of the measurement."""
    eager = number(case.way("eager").get("step_ms")) or math.inf
    words = {"change": "run eager; fix graph breaks first"} if case.on_cpu else {}  # no CPU captures a step
    for name, figures in case.measured_ways().items():
        took = number(figures.get("step_ms")) or 0.0
        if took > eager * NOISE and not overlap(figures, case.way("eager")):
            yield SLOWER_PRESET.advice(
                f"{name} takes {figure(took)} ms a step, eager {figure(eager)}: {figure(took / eager)} times as long",
                milliseconds=took - eager,
                seconds=number(figures.get("cold_seconds")) or 0.0,
                **words,
            )


def find_data_wait(case: Case) -> Found:
    """Yield one advice where a tenth of the time or more went by until batches were there."""
    waited, ran = (number(case.measurements.get(name)) or 0.0 for name in ("data_wait_ms", "data_step_ms"))
    if not waited or not ran or waited < _LEAST_WAIT * (waited + ran):
        return
    workers = case.measurements.get("data_workers")
    by = f" from {count(workers, 'worker')}" if type(workers) is int and workers else ""
    yield DATA_WAIT.advice(
        f"a step waits {figure(waited)} ms for its batch{by}, then takes {figure(ran)} ms: "
        f"{waited / (waited + ran):.0%} of the time",
        milliseconds=waited,
    )


def find_never_pays(case: Case) -> Found:
    """Yield one advice per way that was measured to be faster, but not by enough."""
    eager = number(case.way("eager").get("step_ms")) or 0.0
    for name, figures in case.measured_ways().items():
        cold, took = (number(figures.get(key)) or 0.0 for key in ("cold_seconds", "step_ms"))
        saves = eager - took
        if saves <= 0 or cold <= 0 or overlap(figures, case.way("eager")):  # `slower_preset` finds slower ways
            continue
        pays = math.ceil(cold * 1e3 / saves)
        if pays > case.steps:
            assumed = f"nobody said how many; {case.steps:,} assumed"
            yield NEVER_PAYS.advice(
                f"{name} takes {figure(cold)} s to compile and saves {figure(saves)} ms a step: it pays after "
                f"{pays:,} steps, {f'{case.steps:,} are planned' if case.planned else assumed}",
                seconds=cold - case.steps * saves / 1e3,
            )


def find_cold_cache(case: Case) -> Found:
    """Yield one advice for the run where its last start found nothing in the compile caches."""
    compiled = case.of(ev.Compiled)
    missed = [event for event in compiled if event.cache_misses]
    if case.starts > 1 and missed and not any(event.cache_hits for event in compiled):
        graphs, seconds = sum(event.cache_misses for event in missed), sum(event.seconds for event in missed)
        yield COLD_CACHE.advice(
            f"start no. {case.starts} of this run found none of {count(graphs, 'graph')} in the compile caches, and "
            f"compiled for {figure(seconds)} s",
            seconds=seconds,
            compiles=len(missed),
        )


def find_memory(case: Case) -> Found:
    """Yield one advice per way that needs more than eager, and one for a device that is nearly full."""
    eager = number(case.way("eager").get("peak_bytes"))
    peaks = {name: number(figures.get("peak_bytes")) or 0.0 for name, figures in case.measured_ways().items()}
    for name, peak in peaks.items():
        if eager is not None and peak > max(eager * _MORE, eager + _LEAST_BYTES):
            what = f"{name} needs {size(peak)} at its peak, eager {size(eager)}"
            yield MEMORY.advice(what, nbytes=round(peak - eager))
    peaks["eager"] = eager or 0.0
    available = number(case.environment.get("device_memory_bytes"))
    highest = max(peaks, key=peaks.__getitem__)
    if available is not None and peaks[highest] > _NEARLY * available:
        used = f"{peaks[highest] / available:.0%} of the device's {size(available)}"
        yield NEAR_LIMIT.advice(f"{highest} needs {used}")
