"""What ran, component by component: what was asked for, what ran, and the causes of any difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop.report.text import count, line, number, place, seconds, words

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
    "cache_misses": "cache miss",
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


def components(known: Mapping[str, Mapping[str, Any]]) -> list[Component]:
    """Return every component of a record, in its own order."""
    return [_Status(entry).component(name) for name, entry in known.items()]


class _Status:
    """A component's status in the record."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.entry = entry
        self.requested, self.running = line(entry.get("requested"), 60), line(entry.get("running"), 60)
        self.inference, self.state = line(entry.get("inference") or "", 60), line(entry.get("state"), 40)
        if self.requested.lower() == "none" and self.inference:  # it is compiled for inference only
            self.requested = self.inference
        causes, modes = entry.get("causes"), entry.get("modes")
        self.causes = [Cause.read(cause) for cause in causes] if isinstance(causes, list) else []
        known_modes = modes.items() if isinstance(modes, Mapping) else ()
        self.modes = {line(name, 40): mode for name, mode in known_modes if isinstance(mode, Mapping)}

    def component(self, name: str) -> Component:
        """Return the component as a report shows it."""
        tones: dict[str, Tone] = {"eager": "bad", "pending": "note"}
        if self.as_asked:
            tones = {self.state: "note" if self.state == "eager" else "good"}
        return Component(
            name=line(name, 80),
            requested=self.requested,
            inference="" if self.inference.lower() == self.requested.lower() else self.inference,
            running=self.running,
            state=self.state,
            tone=tones.get(self.state, "warn"),
            sentence=self.sentence(),
            facts=tuple(self.facts()),
            causes=tuple(self.causes[:CAUSES]),
            causes_left=max(0, len(self.causes) - CAUSES),
            as_asked=self.as_asked,
        )

    @property
    def as_asked(self) -> bool:
        """Whether it ran as asked; whatever auto decides is as asked, unless something failed."""
        requested = self.requested.lower()
        if requested == "auto":
            return self.state in ("eager", "captured", "compiled") and not self.causes
        states = ("eager",) if requested == "none" else ("compiled", "captured")
        return requested == self.running.lower() and self.state in states

    def sentence(self) -> str:
        """Say what was asked for and what ran."""
        requested, running, state = self.requested, self.running, self.state
        if self.as_asked and requested.lower() == "auto":
            return f"ran {running}, as auto decided"
        if self.as_asked:
            ran = {"eager": "eager", "captured": f"captured ({running})"}.get(state, f"compiled with {running}")
            return f"ran {ran}, as asked"
        rung = f"the rest on {running}" if running.lower() not in {requested.lower(), "none"} else "the rest eager"
        ran = {"eager": "ran eager", "pending": "was not called", "partial": f"ran partly compiled, {rung}"}.get(
            state, f"ran {running} ({state})"
        )
        return f"was asked for {requested} and {ran}"

    def facts(self) -> Iterator[str]:
        """Say the counts that are not zero, the compile time, and whatever a later version added."""
        entry = self.entry
        # An eager component that counted nothing was not counted: "0 eager runs" would be untrue.
        always = {"compiles", "frames_compiled", "frames_eager"}
        if self.state == "eager" and not any(number(entry.get(key)) for key in always):
            always = set()
        for key, noun in _COUNTS.items():
            many = number(entry.get(key))
            if many is not None and (many or key in always):
                yield f"{many:,.0f} cache misses" if noun == "cache miss" and many != 1 else count(int(many), noun)
        spent = number(entry.get("compile_seconds"))
        if spent:
            yield f"{seconds(spent)} compiling"
        calls = {name: number(mode.get("calls")) for name, mode in self.modes.items()}
        called = [f"{count(int(many), 'call')} in {name}" for name, many in calls.items() if many]
        yield from called if len(called) > 1 else ()
        yield from self.cudagraph_facts()
        regions = entry.get("regions")
        if isinstance(regions, list) and len(regions) > 1:
            yield f"in {count(len(regions), 'region')}"
        apart = {
            *("name", "requested", "inference", "running", "state", "causes", "compile_seconds", "regions", "modes"),
            *("outputs_copied", "bytes_copied", "cudagraphs_skipped", "recompiled"),
        }
        for key in sorted(entry.keys() - _COUNTS.keys() - apart):
            if entry[key] not in (None, "", []):
                yield f"{words(key)}: {line(entry[key], 120)}"

    def cudagraph_facts(self) -> Iterator[str]:
        """Say what CUDA graphs cost and did: copies, calls per step, calls inside a backward, graphs not captured."""
        copied, nbytes = (number(self.entry.get(key)) for key in ("outputs_copied", "bytes_copied"))
        if copied:
            yield f"{count(int(copied), 'output')} of CUDA graphs copied, {(nbytes or 0) / 2**20:,.1f} MiB"
        for name, mode in self.modes.items():
            shapes, pace = mode.get("shapes"), mode.get("calls_per_step")
            if not isinstance(shapes, Mapping):
                continue
            if isinstance(pace, Mapping) and pace:
                calls = ", ".join(line(calls, 20) for calls in list(pace)[:5])
                yield f"{name}: {calls} calls a step, on {count(len(shapes), 'shape')}"
            if inside := number(mode.get("calls_in_backward")):
                yield f"{name}: {count(int(inside), 'call')} inside a backward"
        skipped = self.entry.get("cudagraphs_skipped")
        for reason in skipped[:5] if isinstance(skipped, list) else ():
            yield f"no CUDA graph was captured: {line(reason, 200)}"
