"""What ran, component by component: what was asked for, what ran, and the causes of any difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.report.text import count, line, number, place, seconds, words

if TYPE_CHECKING:
    from hotloop.report.occurrences import Tone

_SHOWN_APART = {
    *("name", "requested", "inference", "running", "state", "causes", "compile_seconds", "regions", "modes"),
    *("outputs_copied", "bytes_copied", "cudagraphs_skipped", "recompiled"),
}
_SKIPS = 5
"""Reasons for graphs that were not captured which are shown."""
_COUNTS = {
    "compiles": "compile",
    "frames_compiled": "compiled run",
    "frames_eager": "eager run",
    "recompiles": "recompile",
    "graph_breaks": "graph break",
    "fallbacks": "fallback",
    "cache_hits": "cache hit",
    "cache_misses": "cache miss",
}
_ALWAYS = {"compiles", "frames_compiled", "frames_eager"}
_AUTO = "auto"
_DECIDED = ("eager", "captured", "compiled")
CAUSES = 20
"""Causes of a component that are shown."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a component does not run as asked."""

    reason: str
    stage: str
    where: str
    source: str
    hint: str


@dataclasses.dataclass(frozen=True)
class Component:
    """One component.

    ``inference`` is the preset asked for while gradients are off, empty where it is the same; ``as_asked``: it ran what
    was requested, or was to run eager and did.
    """

    name: str
    requested: str
    inference: str
    running: str
    state: str
    tone: Tone
    sentence: str
    facts: tuple[str, ...]
    causes: tuple[Cause, ...]
    causes_left: int
    as_asked: bool


def components(known: Mapping[str, Mapping[str, Any]]) -> list[Component]:
    """Read every component of a record, in its own order."""
    return [_component(line(name, 80), entry) for name, entry in known.items()]


def _component(name: str, entry: Mapping[str, Any]) -> Component:
    requested, running = line(entry.get("requested"), 60), line(entry.get("running"), 60)
    state = line(entry.get("state"), 40)
    listed = entry.get("causes")
    all_causes = [_cause(each) for each in listed] if isinstance(listed, list) else []
    if requested.lower() == "none" and entry.get("inference"):  # what is compiled for inference alone
        requested = line(entry["inference"], 60)
    same = requested.lower() == running.lower()
    as_asked = same and state in (("eager",) if requested.lower() == "none" else ("compiled", "captured"))
    if requested.lower() == _AUTO:  # whatever it decides is as asked, unless something of it failed
        as_asked = state in _DECIDED and not all_causes
    return Component(
        name=name,
        requested=requested,
        inference=_inference(entry, requested),
        running=running,
        state=state,
        tone=_tone(state, as_asked=as_asked, eager=requested.lower() == "none" or state == "eager"),
        sentence=_sentence(requested, running, state, as_asked=as_asked),
        facts=tuple(_facts(entry)),
        causes=tuple(all_causes[:CAUSES]),
        causes_left=max(0, len(all_causes) - CAUSES),
        as_asked=as_asked,
    )


def _inference(entry: Mapping[str, Any], requested: str) -> str:
    asked = line(entry.get("inference") or "", 60)
    return "" if asked.lower() == requested.lower() else asked


def _cause(entry: Any) -> Cause:
    if not isinstance(entry, Mapping):
        return Cause(line(entry, 600), "", "", "", "")
    said = {key: line(entry.get(key) or "", 600) for key in ("reason", "stage", "source", "hint")}
    return Cause(said["reason"], said["stage"], place(entry), said["source"], said["hint"])


def _tone(state: str, *, as_asked: bool, eager: bool) -> Tone:
    if as_asked:
        return "note" if eager else "good"
    tones: dict[str, Tone] = {"eager": "bad", "pending": "note"}
    return tones.get(state, "warn")


def _sentence(requested: str, running: str, state: str, *, as_asked: bool) -> str:
    if as_asked and requested.lower() == _AUTO:
        return f"ran {running}, as auto decided"
    if as_asked:
        ran = {"eager": "eager", "captured": f"captured ({running})"}.get(state, f"compiled with {running}")
        return f"ran {ran}, as asked"
    asked = f"was asked for {requested}"
    if state == "eager":
        return f"{asked} and ran eager"
    if state == "pending":
        return f"{asked} and was not called"
    if state == "partial":
        rung = f"the rest on {running}" if running.lower() not in {requested.lower(), "none"} else "the rest eager"
        return f"{asked} and ran partly compiled, {rung}"
    return f"{asked} and ran {running} ({state})"


def _facts(entry: Mapping[str, Any]) -> list[str]:
    """Say the counts that are not zero, the compile time, and whatever a later version added."""
    facts = []
    # What runs as it was written is not counted: that it ran eager 0 times would be untrue.
    counted = entry.get("state") != "eager" or any(number(entry.get(key)) for key in _ALWAYS)
    for key, noun in _COUNTS.items():
        many = number(entry.get(key))
        if many is not None and (many or (counted and key in _ALWAYS)):
            facts.append(_plural(int(many), noun))
    spent = number(entry.get("compile_seconds"))
    if spent:
        facts.append(f"{seconds(spent)} compiling")
    facts += _modes(entry.get("modes"))
    facts += _cudagraphs(entry)
    regions = entry.get("regions")
    if isinstance(regions, list) and len(regions) > 1:
        facts.append(f"in {count(len(regions), 'region')}")
    unknown = entry.keys() - _COUNTS.keys() - _SHOWN_APART
    return facts + [
        f"{words(key)}: {line(entry[key], 120)}" for key in sorted(unknown) if entry[key] not in (None, "", [])
    ]


def _modes(modes: Any) -> list[str]:
    """Say how often each mode was called, where more than one was."""
    if not isinstance(modes, Mapping):
        return []
    calls = {line(mode, 40): number(each.get("calls")) for mode, each in modes.items() if isinstance(each, Mapping)}
    called = [f"{count(int(many), 'call')} in {mode}" for mode, many in calls.items() if many]
    return called if len(called) > 1 else []


def _cudagraphs(entry: Mapping[str, Any]) -> list[str]:
    """Say what CUDA graphs cost and did: copies, the pace of calls, calls inside a backward, graphs not captured."""
    facts = []
    copied, held = number(entry.get("outputs_copied")), number(entry.get("bytes_copied"))
    if copied:
        facts.append(f"{count(int(copied), 'output')} of CUDA graphs copied, {(held or 0) / 2**20:,.1f} MiB")
    modes = entry.get("modes")
    for mode, each in modes.items() if isinstance(modes, Mapping) else ():
        if not isinstance(each, Mapping) or not isinstance(each.get("shapes"), Mapping):
            continue
        pace = each.get("calls_per_step")
        if isinstance(pace, Mapping) and pace:
            said = ", ".join(line(calls, 20) for calls in list(pace)[:_SKIPS])
            facts.append(f"{line(mode, 40)}: {said} calls a step, on {count(len(each['shapes']), 'shape')}")
        if inside := number(each.get("calls_in_backward")):
            facts.append(f"{line(mode, 40)}: {count(int(inside), 'call')} inside a backward")
    skipped = entry.get("cudagraphs_skipped")
    reasons = skipped[:_SKIPS] if isinstance(skipped, list) else []
    return facts + [f"no CUDA graph was captured: {line(reason, 200)}" for reason in reasons]


def _plural(many: int, noun: str) -> str:
    return f"{many:,} cache misses" if noun == "cache miss" and many != 1 else count(many, noun)
