"""Rules on what was observed in a run: compiles that failed or reached nothing, tiers that were declined or undone."""

from __future__ import annotations

import functools
import re

from hotloop import events as ev
from hotloop.diagnose.case import Case, grouped, number
from hotloop.diagnose.rule import Advice, Found, Problem
from hotloop.diagnose.words import several
from hotloop.report.text import count

_no_effect = functools.partial(Problem, rule="no_effect", cost="all of it: the component runs eager")
_skipped = functools.partial(
    Problem,
    rule="cudagraphs_skipped",
    cost="these graphs are launched kernel by kernel, at the speed of preset default",
    remedy="tier",
)
_LOWER = "the speed of the lower rung instead of the preset's"
FALLBACKS = (
    Problem(
        rule="fallback",
        kind="failed",
        symptom="a preset failed, and a lower one runs",
        cause="the compiler could not compile the graph; hotloop took the next rung of the component's ladder",
        cost=_LOWER,
        change="fix what the reason names, or ask for the preset that runs: then the failing preset costs no attempt",
    ),
    Problem(
        rule="fallback",
        kind="unavailable",
        symptom="this machine cannot run a preset",
        cause="a part that the preset needs is missing",
        cost=_LOWER,
        change="install what is missing, or ask for the preset that runs",
    ),
    Problem(
        rule="fallback",
        kind="run_failed",
        symptom="compiled code failed while it ran, where eager does not",
        cause="a compiler's mistake, or memory: the same operations succeed in eager",
        cost="the run, from that step on",
        change="resume from the last checkpoint with a lower preset (aot_eager, none); a hotloop.Loop undoes such "
        "a step itself",
        remedy="tier",
    ),
)
NO_EFFECT = (
    _no_effect(
        kind="bypassed",
        symptom="the model is trained, but its compiled call is never entered",
        cause="hotloop.compile replaces the call model(x); model.forward(x) and other methods bypass it",
        change="call the model itself, model(x), or compile what is called: m.method = hotloop.compile(m.method)",
    ),
    _no_effect(
        kind="container",
        symptom="a container was compiled, and reaches no graph",
        cause="a ModuleList or ModuleDict has no call of its own, and torch's own module.compile() skips the call "
        "of a Sequential: only what is inside them is called",
        change="compile the modules inside it, each of them or the model around them",
    ),
    _no_effect(
        kind="offloaded",
        symptom="a part that is offloaded stays eager",
        cause="hooks move it to the device and back, which no graph can hold",
        change="do not offload the part if it fits on the device: then it is compiled whole",
    ),
    _no_effect(
        kind="no_graph",
        symptom="no tensor operation of a component reaches a graph",
        cause="its call does no work that torch traces: it calls code that is skipped, or compiled separately",
        change="compile the module or function that does the work",
    ),
    _no_effect(
        kind="transform",
        symptom="a compiled model is called under a transform of torch.func",
        cause="torch cannot compile a part of a function that grad, vmap or the like transform",
        change="compile the function that applies the transform instead",
    ),
    _no_effect(
        kind="method",
        symptom="a step method is left eager, and the modules that it calls are compiled",
        cause="it reads values that change from step to step (self.global_step, a metric's count), so torch would "
        "recompile it again and again",
        cost="what the method computes beside its modules (a loss) runs operation by operation",
        change="move what it computes beside its modules into a module, or read the changing values outside of "
        "the method",
    ),
)
DISABLED = Problem(
    rule="disabled",
    symptom="HOTLOOP_DISABLE is set",
    cause="the variable makes everything run eager, to rule hotloop out as a cause",
    cost="all that compiling and capturing would have saved",
    change="unset HOTLOOP_DISABLE",
)
CUDAGRAPHS = {
    "cpu device": _skipped(
        kind="cpu",
        symptom="a tensor on the CPU keeps CUDA graphs out",
        cause="a CUDA graph holds GPU work only, and the model computes with a tensor on the CPU",
        change="make the tensor on the GPU (device=x.device), or move it there once, outside the model",
    ),
    "mutated inputs|input storage mutation": _skipped(
        kind="mutation",
        symptom="an input that is changed in place keeps CUDA graphs out",
        cause="the graph would change its own copy of the input, not the caller's",
        change="copy the input inside the model before it is changed, or hold it as a buffer of the module",
    ),
    "symbolic shapes|dynamic": _skipped(
        kind="dynamic",
        symptom="dynamic shapes keep CUDA graphs out",
        cause="a CUDA graph is for exact sizes",
        change="pad to a few sizes and compile with dynamic=False",
    ),
    "incompatible op|control flow operator|index_put_|sparsity": _skipped(
        kind="operator",
        symptom="an operator keeps CUDA graphs out",
        cause="the operator waits for the host or depends on values, which a replay cannot do",
        change="replace the operator (a mask instead of boolean indexing, torch.where instead of cond), or move "
        "it out of the model",
    ),
    "": _skipped(
        kind="other",
        symptom="CUDA graphs were left out",
        cause="Inductor names the reason",
        change="fix what the reason names, or ask for preset default, which uses no CUDA graphs",
    ),
}
"""Each problem by a pattern of torch's reason; the first that fits is the cause."""
CHECKPOINT_OUTSIDE = Problem(
    rule="checkpoint_outside",
    symptom="activation checkpointing wraps compiled code from outside",
    cause="the recomputation calls the compiled code a second time as a whole: the compiler cannot choose "
    "what to keep, nor fuse the recomputation into the backward",
    cost="a whole second forward in each backward; inside the compiled part only what is cheap is recomputed",
    change="compile the module that calls torch.utils.checkpoint (use_reentrant=False), not the one inside it",
)
SETTING_SWITCHED = Problem(
    rule="setting_switched",
    kind="tf32",
    symptom="TF32 was switched on by a framework",
    cause="matrix products in float32 then keep 10 bits of each factor: faster, and 1,000 times less exact",
    cost="numerics that differ from the same code without the framework; none in time",
    change='decide it yourself, before the first step: torch.set_float32_matmul_precision("highest") for '
    'float32, "high" for TF32',
)
TIER_DECLINED = Problem(
    rule="tier_declined",
    symptom="a tier is declined",
    cause="the step does something that a tier cannot repeat, or the tier did not agree with its reference",
    cost="what the tier would have saved a step, if it was measured",
    change="do what the hint says; the advice names the line if it is known",
)
CAPTURE_DROPPED = Problem(
    rule="capture_dropped",
    symptom="a captured step is recorded again and again",
    cause="a recording freezes every setting and attribute that the step reads; one of them keeps changing",
    cost="each time, the steps that audit, warm up and record",
    change="keep it constant, pass it as a tensor argument, or set it less often",
)
STEP_UNDONE = Problem(
    rule="step_undone",
    symptom="a step failed in its tier and was undone",
    cause="compiled or captured code failed where eager does not; no parameter had been written, so the step "
    "was repeated in eager",
    cost="the step twice, and the tier from then on",
    change="fix what the reason names, or choose a lower tier: run='eager'",
    remedy="tier",
)
_CONTAINERS = r"\b(?:Sequential|ModuleList|ModuleDict|ParameterList|ParameterDict)\b"


def find_fallbacks(case: Case) -> Found:
    """Yield one advice per failure, however many graphs met it."""
    failed, unavailable, run_failed = FALLBACKS
    # A component steps down for the reason that its graphs failed for, so both are one failure.
    for group in grouped(case.of(ev.Fallback), lambda event: (event.component, event.from_preset, event.reason)):
        first = next((event for event in group if event.file), group[0])
        whole = any(event.scope == "component" for event in group)
        what = "all of it" if whole else count(sum(event.scope == "graph" for event in group), "graph")
        yield failed.advice(
            f"preset {first.from_preset} failed ({first.stage}) on {what}: {first.reason}; {_runs(first.to_preset)}",
            **case.place(first),
            times=len(group),
            change=f"{first.hint}; or ask for preset {first.to_preset}" if first.hint else failed.change,
        )
    for missing in grouped(case.of(ev.Unavailable), lambda event: (event.preset, event.missing, event.running)):
        lacks, names = missing[0], dict.fromkeys(event.component for event in missing if event.component)
        yield unavailable.advice(
            f"preset {lacks.preset} cannot run here: {lacks.missing}; {_runs(lacks.running)}",
            component=", ".join(names) or None,
            times=len(names) or 1,
        )
    undone = {event.reason for event in case.of(ev.StepUndone)}  # found by the rule `step_undone`
    for event in case.of(ev.RunFailed):
        if event.reason not in undone:
            what = f"compiled code failed in its {event.phase} under preset {event.preset}: {event.reason}"
            yield run_failed.advice(what, **case.place(event))


def _runs(preset: str) -> str:
    return "it runs eager" if preset == "none" else f"preset {preset} runs"


def no_effect(kind: str) -> Problem:
    """Return the problem of a kind of `NoEffect` event."""
    return next(problem for problem in NO_EFFECT if problem.kind == kind)


def find_no_effect(case: Case) -> Found:
    """Yield one advice per component and reason why its compile reached nothing."""
    known = {problem.kind for problem in NO_EFFECT}  # a record of a later version may hold others
    kinds = [("container" if re.search(_CONTAINERS, one.reason) else one.problem, one) for one in case.of(ev.NoEffect)]
    told = [(kind, event) for kind, event in kinds if kind in known]
    for group in grouped(told, lambda item: (item[0], item[1].component)):
        kind, event = next((item for item in group if item[1].file), group[0])
        yield no_effect(kind).advice(event.reason, **case.place(event), times=len(group))


def find_disabled(case: Case) -> Found:
    """Yield one advice for a run in which everything ran eager by HOTLOOP_DISABLE."""
    causes = [(name, cause) for name, cause in case.causes() if cause.get("stage") == "disabled"]
    value = str(case.environment.get("HOTLOOP_DISABLE", "") or "")
    if causes:
        names = ", ".join(dict.fromkeys(name for name, _ in causes))
        what = f"{causes[0][1].get('reason')}: everything runs eager"
        yield DISABLED.advice(what, component=names, times=len(causes))
    elif value.strip().lower() not in ("", "0", "false", "no"):
        yield DISABLED.advice(f"HOTLOOP_DISABLE={value} is set: everything runs eager")


def find_cudagraphs_skipped(case: Case) -> Found:
    """Yield one advice per reason why Inductor left CUDA graphs out, and per place."""
    skipped = [event for event in case.of(ev.Compiled) if event.cudagraphs_skipped]
    for group in grouped(skipped, lambda event: (event.component, event.cudagraphs_skipped)):
        reason = group[0].cudagraphs_skipped or ""
        frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*(?:\n\s*([^\n]+))?', reason)
        own = [frame for frame in frames if not re.search(r"[/\\]torch[/\\]", frame[0])]
        file, line, source = own[-1] if own else ("", "0", "")
        problem = next(problem for pattern, problem in CUDAGRAPHS.items() if re.search(pattern, reason))
        said = reason.split("Found from")[0].strip().rstrip(".")
        yield problem.advice(
            f"CUDA graphs were left out of {count(len(group), 'graph')}: {said}",
            component=group[0].component,
            file=file or None,
            line=int(line) or None,
            source=source.strip(),
            times=len(group),
        )


def find_checkpoints_outside(case: Case) -> Found:
    """Yield one advice per place."""
    events = case.of(ev.CheckpointOutside)
    for group in grouped(events, lambda event: (event.component, event.file, event.line, event.function)):
        what = f"activation checkpointing wraps {group[0].function} from outside"
        yield CHECKPOINT_OUTSIDE.advice(what, **case.place(group[0]), times=len(group))


def find_settings_switched(case: Case) -> Found:
    """Yield one advice per setting and by who changed it."""
    for group in grouped(case.of(ev.SettingSwitched), lambda event: (event.setting, event.by, event.after)):
        event = group[0]
        yield SETTING_SWITCHED.advice(f"{event.by} set {event.setting} to {event.after}", times=len(group))


def find_declined(case: Case) -> Found:
    """Yield one advice per reason and line, with all tiers that it rules out; host syncs and undone steps apart."""
    waits = {(event.file, event.line) for event in case.of(ev.HostSync) if event.file}
    undone = {(event.function, event.tier, event.reason) for event in case.of(ev.StepUndone)}
    told = [one for one in case.of(ev.TierDeclined) if (one.file, one.line) not in waits]
    told = [one for one in told if (one.function, one.tier, one.reason) not in undone]
    for group in grouped(told, lambda event: (event.function, event.reason, event.file, event.line)):
        event = group[0]
        yield TIER_DECLINED.advice(
            f"{several(declined.tier for declined in group)} of {event.function} was declined: {event.reason}",
            **case.place(event),
            milliseconds=_saved_ms(case, group),
            times=len(group),
            change=event.hint or TIER_DECLINED.change,
        )


def _saved_ms(case: Case, group: list[ev.TierDeclined]) -> float | None:
    """Return the ms a step that the fastest of the declined tiers would save; None if it was not measured."""
    eager = number(case.way("eager").get("step_ms")) or 0.0
    steps = [number(case.way(event.tier).get("step_ms")) for event in group]
    fastest = min((step for step in steps if step is not None), default=eager)
    return eager - fastest if fastest < eager else None


def find_captures_dropped(case: Case) -> Found:
    """Yield one advice per step function and per thing that changes in it, from the second time on."""
    events = case.of(ev.CaptureDropped)
    for group in grouped(events, lambda event: (event.function, re.sub(r"\d+", "#", event.reason))):
        if len(group) == 1:  # a program that changes its phase drops its recording once
            continue
        function, first = group[0].function, min(event.step for event in group)
        again = [event for event in case.of(ev.Captured) if event.function == function and event.step > first]
        yield CAPTURE_DROPPED.advice(
            f"the recording of {function} was dropped {count(len(group), 'time')}: {group[0].reason} changed",
            component=group[0].component,
            times=len(group),
            seconds=sum(event.seconds for event in again),
        )


def find_undone(case: Case) -> Found:
    """Yield one advice per tier and reason."""
    places = {(event.function, event.tier): event for event in reversed(case.of(ev.TierDeclined))}
    for group in grouped(case.of(ev.StepUndone), lambda event: (event.function, event.tier, event.reason)):
        yield _undone(case, group, places.get((group[0].function, group[0].tier)))


def _undone(case: Case, group: list[ev.StepUndone], declined: ev.TierDeclined | None) -> Advice:
    event, steps = group[0], several(undone.step for undone in group)
    place = case.place(declined) if declined else {}
    return STEP_UNDONE.advice(
        f"{count(len(group), 'step')} of {event.function} failed in {event.tier} and ran eagerly instead "
        f"(step {steps}): {event.reason}",
        **{**place, "component": event.component},
        times=len(group),
    )
