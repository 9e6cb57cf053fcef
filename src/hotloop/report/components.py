"""What ran, component by component: what was asked for, what ran, and the causes of any difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.report.text import count, line, listing, mapping, number, place, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.report.occurrences import Tone

CAUSES = 20
"""Causes of a component that are shown."""
_COUNTS = {
    "compiles": "compile",
    "frames_compiled": "compiled run",
    "frames_eager": "eager run",
    "recompiles": "recompile",
    "graph_breaks": "graph break",
    "fallbacks": "fallback",
    "cache_hits": "cache hit",
}


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a component does not run as asked."""

    reason: str
    stage: str
    where: str
    source: str
    hint: str

    @classmethod
    def read(cls, entry: Any) -> Cause:
        """Return a cause of the component's status; an entry that is no mapping is taken as its reason."""
        if not isinstance(entry, Mapping):
            return cls(line(entry, 600), "", "", "", "")
        texts = {key: line(entry.get(key) or "", 600) for key in ("reason", "stage", "source", "hint")}
        return cls(where=place(entry), **texts)


@dataclasses.dataclass(frozen=True)
class Component:
    """One component.

    ``inference`` is the preset asked for while gradients are off, empty if it is the same. ``as_asked``: it ran what
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

    @classmethod
    def read(cls, name: str, entry: Mapping[str, Any]) -> Component:
        """Return a component by its status in the record."""
        asked, inference, running = (line(entry.get(key) or "", 60) for key in ("requested", "inference", "running"))
        if asked.lower() == "none" and inference:  # it is compiled for inference only
            asked = inference
        asked, running = asked or line(None), running or line(None)
        state, causes = line(entry.get("state"), 40), listing(entry.get("causes"))
        as_asked = _is_as_asked(asked.lower(), running.lower(), state, failed=bool(causes))
        tones: dict[str, Tone] = {"eager": "bad", "pending": "note"}
        if as_asked:
            tones = {state: "note" if state == "eager" else "good"}
        return cls(
            name=line(name, 80),
            requested=asked,
            inference="" if inference.lower() == asked.lower() else inference,
            running=running,
            state=state,
            tone=tones.get(state, "warn"),
            sentence=_as_asked(asked, running, state) if as_asked else _otherwise(asked, running, state),
            facts=tuple(_facts(entry, state)),
            causes=tuple(map(Cause.read, causes[:CAUSES])),
            causes_left=max(0, len(causes) - CAUSES),
            as_asked=as_asked,
        )


def components(known: Mapping[str, Mapping[str, Any]]) -> list[Component]:
    """Return every component of a record, in its own order."""
    return [Component.read(name, entry) for name, entry in known.items()]


def _is_as_asked(requested: str, running: str, state: str, *, failed: bool) -> bool:
    """Return whether it ran as asked; whatever auto decides is as asked, unless something failed."""
    if requested == "auto":
        return state in ("eager", "captured", "compiled") and not failed
    states = ("eager",) if requested == "none" else ("compiled", "captured")
    return requested == running and state in states


def _as_asked(requested: str, running: str, state: str) -> str:
    if requested.lower() == "auto":
        return f"ran {running}, as auto decided"
    ran = {"eager": "eager", "captured": f"captured ({running})"}.get(state, f"compiled with {running}")
    return f"ran {ran}, as asked"


def _otherwise(requested: str, running: str, state: str) -> str:
    rung = "the rest eager" if running.lower() in {requested.lower(), "none"} else f"the rest on {running}"
    said = {"eager": "ran eager", "pending": "was not called", "partial": f"ran partly compiled, {rung}"}
    return f"was asked for {requested} and {said.get(state, f'ran {running} ({state})')}"


def _facts(entry: Mapping[str, Any], state: str) -> Iterator[str]:
    """Say the counts that are not zero, the compile time, and what CUDA graphs cost."""
    # An eager component that counted nothing was not counted: "0 eager runs" would be untrue.
    always = {"compiles", "frames_compiled", "frames_eager"}
    if state == "eager" and not any(number(entry.get(key)) for key in always):
        always = set()
    for key, noun in _COUNTS.items():
        many = number(entry.get(key))
        if many is not None and (many or key in always):
            yield count(int(many), noun)
    if spent := number(entry.get("compile_seconds")):
        yield f"{seconds(spent)} compiling"
    yield from _calls(mapping(entry.get("modes")))
    copied, nbytes = (number(entry.get(key)) for key in ("outputs_copied", "bytes_copied"))
    if copied:
        yield f"{count(int(copied), 'output')} of CUDA graphs copied, {(nbytes or 0) / 2**20:,.1f} MiB"
    for reason in listing(entry.get("cudagraphs_skipped"))[:5]:
        yield f"no CUDA graph was captured: {line(reason, 200)}"
    if len(regions := listing(entry.get("regions"))) > 1:
        yield f"in {count(len(regions), 'region')}"


def _calls(modes: Mapping[str, Any]) -> Iterator[str]:
    """Say the calls in training and inference, where there are both; their pace, shapes, and calls in a backward."""
    known = {line(name, 40): mode for name, mode in modes.items() if isinstance(mode, Mapping)}
    calls = {name: number(mode.get("calls")) for name, mode in known.items()}
    called = [f"{count(int(many), 'call')} in {name}" for name, many in calls.items() if many]
    yield from called if len(called) > 1 else ()
    for name, mode in known.items():
        if pace := mapping(mode.get("calls_per_step")):
            many = ", ".join(line(calls, 20) for calls in list(pace)[:5])
            yield f"{name}: {many} calls a step, on {count(len(mapping(mode.get('shapes'))), 'shape')}"
        if inside := number(mode.get("calls_in_backward")):
            yield f"{name}: {count(int(inside), 'call')} inside a backward"
